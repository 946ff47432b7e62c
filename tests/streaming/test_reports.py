"""What an operator reads: how long an epoch is, how much was read, and how far each source is."""

from __future__ import annotations

import itertools
import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch.utils.data import DataLoader

from streampack import (
    IGNORE_INDEX,
    AnswersEncoder,
    ChatEncoder,
    Group,
    Holdout,
    IterablePackedDataset,
    IterableSource,
    JSONLSource,
    MapSource,
    MediaSample,
    MessagesEncoder,
    Mix,
    PackedDataLoader,
    PackedDataset,
    Sample,
    TextEncoder,
    TokensEncoder,
    plan_packs,
)
from tests.harness.corpus import Numbers, all_of, rows, samples_in, write
from tests.harness.hf_tokenizers import Letters, byte_level
from tests.harness.hf_trainers import samples
from tests.harness.threads import ThreadSync, on_ranks

# Skewed, as those of instructions are.
LENGTHS = np.random.default_rng(0).lognormal(4.3, 0.9, 6_000).clip(1, 400).astype(int)
MANY = [{"tokens": [1] * n, "labels": [1] * n} for n in LENGTHS.tolist()]


def estimated(rows: Any, **settings: Any) -> IterablePackedDataset:
    return IterablePackedDataset(rows, **{"max_seq_len": 256, "overlong": "truncate", **settings})


@pytest.mark.parametrize("kind", ["map", "jsonl"])
@pytest.mark.parametrize("strategy", ["exact_fit", "next_fit"])
def test_an_estimate_of_much_data_is_upward_and_close(tmp_path: Path, kind: str, strategy: str) -> None:
    """Skewed lengths, packs that the strategy leaves part-empty, and lanes that each end with such a one."""
    source: Any = MANY
    if kind == "jsonl":
        source = tmp_path / "rows.jsonl"
        source.write_text("".join(json.dumps({"tokens": row["tokens"]}) + "\n" for row in MANY))
    encoder = TokensEncoder(labels=None)
    known = estimated(source, strategy=strategy, encoder=encoder).estimate(rows=1024, num_lanes=8)
    actual = sum(
        sum(1 for _ in plan_packs(np.minimum(LENGTHS, 256)[lane::8].tolist(), 256, strategy=strategy))
        for lane in range(8)
    )
    assert 0 < known.error < 0.05 * actual
    assert actual <= known.at_most < 1.1 * actual
    assert known.packs == pytest.approx(actual, rel=0.05)


def test_an_estimate_counts_lost_tokens_and_leaves_dropped_samples_out() -> None:
    """Of 300 samples, a third is long; of half of these, the answer is cut off."""
    short = {"tokens": [1] * 10, "labels": [IGNORE_INDEX] * 5 + [1] * 5}
    answered = {"tokens": [1] * 40, "labels": [IGNORE_INDEX] * 10 + [1] * 30}
    lost = {"tokens": [1] * 40, "labels": [IGNORE_INDEX] * 30 + [1] * 10}
    rows = [short, short, short, short, answered, lost] * 50
    for settings, cut in (
        ({}, 40 / 120),
        ({"overlong": "drop"}, 80 / 120),
        ({"overlong": "split"}, 0),
        ({"untrained": "drop"}, 20 / 120),
    ):
        data = estimated(rows, max_seq_len=20, **settings)
        known = data.estimate(rows=300)
        assert known.samples == 300
        assert known.packs == len(list(data))
        assert known.padding == pytest.approx(data.ledger().padding)
        long = 0 if settings.get("overlong") == "split" else 100 - 50 * ("untrained" in settings)
        assert (known.long_samples, known.cut) == (long, pytest.approx(cut))
    with pytest.raises(
        ValueError, match="100 of 300 .*, 66.7% of the tokens, .* sample 4 has 40 tokens; set ov"
    ):
        estimated(rows, max_seq_len=20, overlong="error").estimate(rows=300)
    limited = estimated(rows, max_seq_len=20, overlong="error", max_document_tokens=30).estimate(rows=300)
    assert (limited.long_samples, limited.cut) == (0, 0), (
        "the limit leaves them out, and the run does not stop"
    )


def test_an_estimate_needs_a_length() -> None:
    with pytest.raises(ValueError, match="the length of IterableSource is unknown; set max_steps"):
        estimated(lambda: iter(MANY)).estimate()
    assert estimated(MANY[:1]).estimate().packs == 1


# Map-style data, counted by the lengths of its samples.

LABELLED = [*samples(150), {"tokens": [3] * 70, "labels": [3] * 70}, *samples(50, seed=1)]
HALF = Holdout(Holdout(MapSource(LABELLED), fraction=0.5, part="train"), fraction=0.2, part="train")


def broken(row: Any) -> Sample:
    if row["tokens"][0] % 5 == 0:
        raise ValueError("this one cannot be encoded")
    return Sample(np.array(row["tokens"]), np.array(row["labels"]))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"shuffle": True, "seed": 3},
        {"shuffle": True, "num_lanes": 5, "buffer_size": 3, "strategy": "best_fit"},
        {"split_across_pack": True, "num_lanes": 1},
        {"source": HALF, "shuffle": True, "overlong": "split"},
        {"overlong": "drop", "strategy": "next_fit", "max_seqs_per_pack": 4},
        {"encoder": broken, "skip_bad": True},
        {"encoder": lambda row: {"input_ids": row["tokens"]}},
        {
            "source": [
                {**row, "labels": ([-100] * 9 + row["labels"][9:])[: len(row["labels"])]} for row in LABELLED
            ],
            "untrained": "drop",
        },
        {"num_lanes": 3, "source": [*LABELLED, {"tokens": [], "labels": []}], "skip_bad": True},
    ],
)
def test_counted_packs_equal_those_of_an_epoch(changes: dict[str, Any]) -> None:
    given = {
        "source": LABELLED,
        "max_seq_len": 64,
        "overlong": "truncate",
        "num_lanes": 2,
        "epochs": 3,
    } | changes
    if "split_across_pack" in given:
        del given["overlong"]
    data = IterablePackedDataset(given.pop("source"), **given)
    known = data.estimate(num_lanes=given["num_lanes"])
    assert (known.packs, known.error) == (sum(pack["epoch"] == 0 for pack in data), 0)


# No packs.

LONG = [{"i": i, "n": 30} for i in range(40)]
EMPTY = [{"i": i, "n": 0} for i in range(40)]
CASES: dict[str, tuple[Any, dict[str, Any], str]] = {
    "long": (LONG, {"overlong": "drop"}, "all 40 that were read are dropped (40 longer than a pack)"),
    "empty": (EMPTY, {"skip_bad": True}, "all 40 that were read are dropped (40 broken, and skipped)"),
    "bad": (
        ["no", "rows", "at all"],
        {"skip_bad": True},
        "all 3 that were read are dropped (3 broken, and skipped)",
    ),
    "none": (IterableSource([]), {}, "the source has no rows at all"),
}


def make_case(case: str, **more: Any) -> IterablePackedDataset:
    source, settings, _ = CASES[case]
    return IterablePackedDataset(source, encoder=Numbers(), max_seq_len=24, num_lanes=4, **settings, **more)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("epochs", [1, 3, None])
def test_a_run_without_packs_is_an_error(case: str, epochs: int | None) -> None:
    """Also where it would read the same rows for ever."""
    for door in (make_case(case, epochs=epochs), PackedDataLoader(make_case(case, epochs=epochs))):
        with pytest.raises(ValueError) as error:
            list(door)
        assert CASES[case][2] in str(error.value)


def test_a_run_without_packs_is_an_error_on_all_ranks_and_in_workers() -> None:
    def act(rank_sync: ThreadSync) -> None:
        loader = PackedDataLoader(make_case("long"))
        loader.rank_sync = rank_sync
        batches = iter(loader)
        try:
            list(batches)
        except ValueError:
            with pytest.raises(RuntimeError, match="iterate again"):  # the ranks are in step
                next(batches)
            raise

    with pytest.raises(ValueError) as in_worker:
        list(PackedDataLoader(make_case("long"), num_workers=2))
    for error in [*on_ranks(2, act), in_worker.value]:
        assert isinstance(error, ValueError)
        assert CASES["long"][2] in str(error), "of all ranks' lanes"


@pytest.mark.parametrize("workers", [0, 2])
def test_a_consumer_without_packs_is_no_error_where_others_have_some(workers: int) -> None:
    """The first one's lanes hold what is dropped alone. Nor is a run that is resumed at its end."""
    data = [row for pair in zip(LONG, rows(40), strict=True) for row in pair]

    def of_chats() -> IterablePackedDataset:
        return IterablePackedDataset(
            data, max_seq_len=24, num_lanes=2, overlong="drop", encoder=Numbers(), untrained="keep"
        )

    packs = DataLoader(of_chats(), batch_size=None, num_workers=workers)
    assert samples_in(packs) == all_of(rows(40))
    loader, after = (PackedDataLoader(of_chats(), num_workers=workers) for _ in range(2))
    assert sum(int(batch.num_seqs) for batch in loader) == len(rows(40))
    after.load_state_dict(loader.state_dict())
    assert list(after) == []


def test_a_lane_whose_first_rows_are_all_dropped_says_so(caplog: pytest.LogCaptureFixture) -> None:
    data = [{"i": i, "n": 30} for i in range(1000)] + rows(500)
    settings: dict[str, Any] = {"max_seq_len": 24, "num_lanes": 1, "overlong": "drop"}
    for first, said in ((0, 1), (1, 0)):
        caplog.clear()
        assert len(list(IterablePackedDataset(data[first:], encoder=Numbers(), **settings))) > 10
        assert (
            caplog.text.count(
                "lane 0, so far: no row makes a pack: all 1,000 that were read are dropped (1,000 longer"
            )
            == said
        )


def endless(first: int) -> Iterator[dict[str, int]]:
    """Yield some rows that can be packed, then none, for ever."""
    for i in itertools.count():
        yield {"i": i, "n": 5 if i < first else 30}


@pytest.mark.parametrize(
    ("first", "place", "balance"),
    [
        (0, "alone", 0),
        (300, "alone", 4),
        (0, "in a mixture", 0),
        (300, "in a mixture", 4),
        (300, "held out", 0),
    ],
)
def test_rows_without_an_end_that_are_all_dropped_are_an_error(first: int, place: str, balance: int) -> None:
    def encode(row: dict[str, int]) -> Sample:
        ids = np.arange(row["n"])
        return Sample(ids, ids)

    source: Any = IterableSource(lambda: endless(first))
    if place == "in a mixture":
        source = Mix(
            [
                {"name": "sound", "source": rows(500), "weight": 9},
                {"name": "odd", "source": source, "weight": 1},
            ]
        )
    elif place == "held out":
        source = Holdout(source, fraction=0.1, part="train")
    data = IterablePackedDataset(
        source, encoder=encode, max_seq_len=24, num_lanes=1, overlong="drop", balance_window=balance
    )
    packs = 0
    with pytest.raises(
        ValueError, match="lane 0: the last 100,000 rows that it read are all dropped .*longer than"
    ):
        for _ in data:
            packs += 1
    assert bool(packs) == (first > 0)


def test_as_many_rows_that_are_dropped_are_none_where_the_source_has_an_end(tmp_path: Path) -> None:
    data = [{"input_ids": [1] * 9}] * 100_001 + [{"input_ids": [7, 8]}]
    path = write(tmp_path / "a.jsonl", data)
    for source in (data, path):
        packs = list(IterablePackedDataset(source, max_seq_len=4, num_lanes=1, overlong="drop"))
        assert [pack["tokens"].tolist() for pack in packs] == [[7, 8, 0, 0]]


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize(("most", "dropped"), [(None, 0), (700, 0), (699, 3)])
def test_giant_samples_may_be_left_out(whole: bool, most: int | None, dropped: int, tmp_path: Path) -> None:
    lengths = [{"i": i, "n": 700 if i in (9, 12, 15) else 5} for i in range(30)]
    sources = [
        {"name": name, "source": JSONLSource(write(tmp_path / f"{name}.jsonl", some)), "weight": 1}
        for name, some in (("a", lengths), ("b", [{"i": i, "n": 5} for i in range(100, 130)]))
    ]
    data = IterablePackedDataset(
        Mix(sources), encoder=Numbers(), max_seq_len=10, overlong="split", split_across_pack=whole, num_lanes=1,
        max_document_tokens=most,
    )  # fmt: skip
    list(data)
    assert (data.ledger().dropped["overlong"], data.ledger().dropped_samples["overlong"]) == (
        700 * dropped,
        dropped,
    )


class CountsCharacters(Letters):
    """A tokenizer of bytes that keeps the lengths of the texts that it was asked to encode."""

    def __init__(self) -> None:
        self.encoded: list[int] = []

    def encode(self, text: str, add_bos: bool = True, add_eos: bool = True) -> list[int]:
        self.encoded.append(len(text))
        return super().encode(text, add_bos, add_eos)


@pytest.mark.parametrize("mixed", [False, True])
def test_a_giant_text_is_left_out_before_it_is_encoded(mixed: bool) -> None:
    """By its characters: 16 for each token that is allowed. A text of 3 MB takes seconds to encode."""
    lengths = [5, 16 * 50 + 1, 10**6, 16 * 50, 51, 48, 7]
    rows, tokenizer = [{"text": "a" * length} for length in lengths], CountsCharacters()
    encoder = TextEncoder(tokenizer, add_bos=False)
    source = Mix([{"name": "a", "source": rows, "weight": 1, "encoder": encoder}], stop="all_exhausted")
    data = IterablePackedDataset(
        source if mixed else rows, max_seq_len=50, num_lanes=1, overlong="split", max_document_tokens=50,
        **({} if mixed else {"encoder": encoder}),
    )  # fmt: skip
    known = data.estimate(rows=100)
    tokenizer.encoded.clear()
    packs = list(data)
    assert set(tokenizer.encoded) == {5, 7, 48, 51, 800}
    ledger = data.ledger()
    assert (ledger.dropped_samples["overlong"], ledger.dropped["overlong"]) == (4, 801 + 52)
    assert (ledger.samples, ledger.packed, ledger.untrained) == (7, 6 + 49 + 8, 0)
    assert known.packs == pytest.approx(len(packs), abs=1)
    if mixed:
        return
    with pytest.raises(ValueError, match=r"all 1 that were read are dropped \(1 longer than a pack\)"):
        list(IterablePackedDataset(rows[2:3], encoder=encoder, max_seq_len=50, max_document_tokens=50))
    unlimited = IterablePackedDataset(rows[1:2], encoder=encoder, max_seq_len=50, overlong="split")
    assert len(list(unlimited)) == 17


def talk(text: str, *, parts: bool = False) -> list[dict[str, Any]]:
    """A conversation with the text in its question, and a short answer."""
    content: Any = [{"type": "text", "text": text}] if parts else text
    return [{"role": "user", "content": content}, {"role": "assistant", "content": "Yes"}]


def transformed(name: str) -> MessagesEncoder:
    transform = getattr(pytest.importorskip("torchtune.data"), name)()
    return MessagesEncoder(byte_level(), message_transform=transform)


def chat_encoder() -> ChatEncoder:
    return ChatEncoder(byte_level())


def answers_encoder() -> AnswersEncoder:
    return AnswersEncoder(byte_level())


FORMS: dict[str, tuple[Callable[[], Any], Callable[[str], dict[str, Any]]]] = {
    "messages": (chat_encoder, lambda text: {"messages": talk(text)}),
    "parts": (chat_encoder, lambda text: {"messages": talk(text, parts=True)}),
    "ShareGPT": (
        chat_encoder,
        lambda text: {"conversations": [{"from": "human", "value": text}, {"from": "gpt", "value": "Yes"}]},
    ),
    # JSON text has six characters for each letter of this kind.
    "JSON": (chat_encoder, lambda text: {"messages": json.dumps(talk(text.replace("a", "я")), indent=1)}),
    "prompt": (chat_encoder, lambda text: {"prompt": text, "completion": " yes"}),
    "completion": (chat_encoder, lambda text: {"prompt": "So?", "completion": " " + text}),
    "pair": (answers_encoder, lambda text: {"prompt": "So?", "chosen": " yes", "rejected": " " + text}),
    "pair of messages": (
        answers_encoder,
        lambda text: {"chosen": talk(text), "rejected": [*talk(text)[:1], {"role": "assistant", "content": "No"}]},
    ),
    "rollouts": (answers_encoder, lambda text: {"prompt": "So?", "completions": [" yes", " " + text]}),
    "torchtune": (lambda: transformed("InputOutputToMessages"), lambda text: {"input": text, "output": "Yes"}),
    "torchtune's pair": (
        lambda: transformed("ChosenRejectedToMessages"),
        lambda text: {"chosen": talk(text), "rejected": [*talk(text)[:1], {"role": "assistant", "content": "No"}]},
    ),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:the chat template of")
@pytest.mark.parametrize("form", FORMS)
def test_a_giant_chat_is_left_out_before_it_is_encoded(form: str) -> None:
    """Nor is it encoded for the run's identity. What repeats in a pair counts once, and JSON's escapes do not."""
    make, row = FORMS[form]
    encoded: list[int] = []
    encoder = make()

    class Recording(type(encoder)):  # type: ignore[misc]
        def __call__(self, row: Any, /) -> Any:
            encoded.append(row.get("i"))
            return super().__call__({key: value for key, value in row.items() if key != "i"})

    encoder.__class__ = Recording
    texts = ["aaaaa", "a" * 16 * 62, "a" * (16 * 64 + 1), "a" * 10**6, "aaa"]
    data = IterablePackedDataset(
        [{"i": i, **row(text)} for i, text in enumerate(texts)],
        encoder=encoder, max_seq_len=64, num_lanes=1, overlong="truncate", max_document_tokens=64,
    )  # fmt: skip
    list(data)
    assert encoded == [0, 1, 4]
    ledger = data.ledger()
    assert (ledger.samples, ledger.dropped_samples["overlong"]) == (5, 3), "whatever overlong is"
    data.state_dict()
    assert set(encoded) == {0, 1, 4}


def test_an_image_and_reasoning_that_templates_leave_out_are_no_characters_of_a_chat() -> None:
    image = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{'A' * 10**5}"}}
    messages = [
        {"role": "user", "content": [image, {"type": "text", "text": "What?"}]},
        {"role": "assistant", "content": f"<think>{'hm ' * 10**5}</think>\n\nThat"},
        {"role": "user", "content": None},
    ]
    assert chat_encoder().characters({"messages": messages}) == len("What?That")


# Samples that train nothing.

ANSWER = 3


def chat(i: int, prompt: int) -> dict[str, Any]:
    """A masked prompt of so many tokens, and an answer."""
    return {"tokens": [i + 1] * (prompt + ANSWER), "labels": [IGNORE_INDEX] * prompt + [i + 1] * ANSWER}


# Truncated to 16, every third has no answer left.
CHATS = [chat(i, prompt=(4, 30, 11)[i % 3]) for i in range(60)]
CUT_OFF = [i for i in range(60) if i % 3 == 1]
Door = Callable[..., Any]


def of_chats(rows: Any = CHATS, **settings: Any) -> IterablePackedDataset:
    return IterablePackedDataset(rows, **{"max_seq_len": 16, "overlong": "truncate", **settings})


def map_style(**settings: Any) -> PackedDataset:
    return PackedDataset(CHATS, **{"max_seq_len": 16, "overlong": "truncate", **settings})


def ids(packs: Any) -> set[int]:
    found = (packs[i] for i in range(len(packs))) if isinstance(packs, PackedDataset) else packs
    return {int(token) - 1 for pack in found for token in pack["tokens"] if token}


@pytest.mark.parametrize("door", [of_chats, map_style])
@pytest.mark.parametrize("untrained", [None, "keep", "drop"])
@pytest.mark.parametrize("overlong", ["truncate", "truncate_left"])
def test_samples_that_train_nothing_are_counted_and_dropped(
    door: Door, untrained: str | None, overlong: str
) -> None:
    data = door(overlong=overlong, untrained=untrained)
    lost = CUT_OFF if overlong == "truncate" else []
    gone = lost if untrained == "drop" else []
    assert ids(data) == set(range(60)) - set(gone)
    ledger = data.ledger()
    assert (ledger.untrained, ledger.dropped_samples["untrained"]) == (len(lost), len(gone))
    assert ledger.dropped["untrained"] == len(gone) * (30 + ANSWER)
    if gone:
        assert ledger.dropped_samples["truncated"] == 0, "each loss has one reason"
    assert ledger.buffered == 0
    told = ledger.as_dict()
    assert (told["untrained"], told["dropped_untrained"]) == (len(lost), ledger.dropped["untrained"])


def test_a_sample_that_trains_nothing_is_named_and_not_consumed() -> None:
    data = of_chats(untrained="error", num_lanes=1)
    for _ in range(2):
        with pytest.raises(ValueError) as error:
            list(data)
        assert str(error.value) == (
            "sample 1 trains nothing: none of the 16 tokens that overlong='truncate' leaves of its 33 has a label to "
            "train; raise max_seq_len, choose another overlong, or set untrained to 'drop' or 'keep'"
        )
    with pytest.raises(ValueError, match="sample 1 trains nothing"):
        map_style(untrained="error")


@pytest.mark.parametrize("door", ["stream", "loader", "workers", "map-style"])
def test_untrained_samples_are_said_once_unless_they_are_asked_for(
    door: str, caplog: pytest.LogCaptureFixture
) -> None:
    def read(**settings: Any) -> None:
        if door == "map-style":
            map_style(**settings)
            return
        data = of_chats(num_lanes=2, **settings)
        loader = (
            PackedDataLoader(data, num_workers=2 if door == "workers" else 0) if door != "stream" else data
        )
        for _ in range(2):
            assert len(list(loader)) > 5

    with caplog.at_level(logging.WARNING):
        for settings in ({"untrained": "keep"}, {"untrained": "drop"}, {"overlong": "truncate_left"}, {}):
            read(**settings)
    [record] = [record for record in caplog.records if "train nothing" in record.message]
    assert "max_seq_len=16" in record.message
    assert "untrained='drop'" in record.message


def said(folder: Path) -> Any:
    """Add a handler whose file processes share; `caplog` sees nothing of workers."""
    handler = logging.FileHandler(folder / "log", delay=True)
    logging.getLogger("streampack").addHandler(handler)
    return handler


@pytest.mark.parametrize(
    "door", ["loaders", "torch's workers", "ranks", "second rank alone", "resume", "resume of a loader"]
)
def test_untrained_samples_are_said_once_a_run(door: str, tmp_path: Path) -> None:
    """Not by each loader, worker process, rank and resume. The second lane's come late, so workers do not race."""
    odd = door == "second rank alone"
    rows = [chat(i, prompt=30 if i % 2 == odd or (i > 30 and not odd) else 4) for i in range(60)]
    handler, path = said(tmp_path), tmp_path / "log"
    try:
        data = of_chats(rows, num_lanes=2)
        if door == "loaders":
            assert sum(1 for _ in range(2) for _ in PackedDataLoader(data)) > 40
        elif door == "torch's workers":
            for epoch in range(3):
                data.set_epoch(epoch)
                assert len(list(DataLoader(data, batch_size=None, num_workers=2))) > 20
        elif door in ("ranks", "second rank alone"):

            def rank(sync: ThreadSync) -> int:
                loader = PackedDataLoader(of_chats(rows, num_lanes=2))
                loader.rank_sync = sync
                return len(list(loader))

            assert all(count > 10 for count in on_ranks(2, rank))
        else:
            first = PackedDataLoader(data) if door == "resume of a loader" else data
            next(iter(first))
            state = first.state_dict()
            again = of_chats(rows, num_lanes=2)
            second = PackedDataLoader(again) if door == "resume of a loader" else again
            second.load_state_dict(state)
            assert len(list(second)) > 20
    finally:
        logging.getLogger("streampack").removeHandler(handler)
        handler.close()
    assert path.read_text(encoding="utf-8").count("train nothing") == 1


PAIR = Group([5, 6, 7, 8], [-100, -100, 7, -100], lengths=[2, 1, 1], parents=[-1, 0, 0])


@pytest.mark.parametrize(
    ("row", "what"),
    [
        ([7], "trains nothing: nothing predicts its only token; remove it"),
        (
            {"tokens": [7] * 9, "labels": [-100] * 9},
            "trains nothing: none of its 9 tokens has a label to train; look",
        ),
        (
            chat(1, prompt=30),
            "trains nothing: none of the 16 tokens that overlong='truncate' leaves of its 33 has",
        ),
        (
            MediaSample([7, 8], [-100, -100], media={"pixels": np.ones((1, 1))}),
            "trains nothing: none of its 2 tokens has a label to train; look",
        ),
        (
            PAIR,
            "has an answer that trains nothing: of its 4 tokens, none of that answer's has a label to train; look",
        ),
    ],
)
@pytest.mark.parametrize("door", ["stream", "workers", "map-style"])
def test_the_warning_speaks_of_what_was_seen(
    row: Any, what: str, door: str, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [*CHATS[::3], row]
    if door == "map-style":
        if isinstance(row, Group | MediaSample):
            return
        PackedDataset(rows, max_seq_len=16, overlong="truncate")
    else:
        data = of_chats(rows, num_lanes=1, encoder=lambda row: row)
        assert len(list(PackedDataLoader(data, num_workers=int(door == "workers")))) > 3
    [record] = [record for record in caplog.records if "train nothing" in record.message]
    assert record.message.startswith(
        f"1 of the first {len(rows)} samples train nothing (max_seq_len=16). The first: "
    )
    assert f": sample 20 {what}" in record.message
    assert ("of messages only" in record.message) == ("look" in what), (
        "not of rows of one token, or that were cut"
    )
