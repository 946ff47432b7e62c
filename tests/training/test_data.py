"""Training data and held-out packs of a config, on one rank and on several."""

from __future__ import annotations

import json
import re
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from streampack import HFTokenizer, IterablePackedDataset, PackedDataLoader, collate_packed, encoder_for
from streampack.packing.assemble import null_pack
from streampack.packing.batch import Batch, to_torchtune
from streampack.streaming.first_look import first_look
from streampack.training.checks import read_config
from streampack.training.data import build_data, join_documents
from streampack.training.progress import opening
from streampack.training.world import World
from tests.harness.hf_tokenizers import byte_level
from tests.harness.tiny import WordTokenizer, mixed_config, tiny_config

INPUTS: Any = SimpleNamespace(summary="attention=varlen, float32 on cpu")


class OneOfTwo(World):
    """One of two ranks that exchange equal values. ``asked`` says what one of them did for both."""

    asked: ClassVar[list[str]] = []

    def run_on_main(self, work: Any, *, of: str) -> Any:
        self.asked.append(of)
        return work()

    def gather(self, value: Any) -> list[Any]:
        return [value] * 2

    def broadcast(self, value: Any) -> Any:
        return value


def held_out_of(config: Any, world: World) -> dict[str, list[Batch]]:
    _, held_out = build_data(read_config(config), tokenizer=WordTokenizer(), vocab_size=16, world=world)
    return {name: list(source.batches) for name, source in held_out.items()}


def rows_of(batches: list[Batch]) -> list[list[int]]:
    """Return the tokens of the packs that are not empty."""
    return [
        tokens
        for batch in batches
        for tokens, fragments in zip(batch.tokens.tolist(), batch.fragments, strict=True)
        if fragments
    ]


@pytest.mark.parametrize("max_packs", [1, 5])
def test_held_out_packs_of_each_source_are_divided_over_the_ranks(tmp_path: Path, max_packs: int) -> None:
    for config, names in (
        (tiny_config(tmp_path / "one"), [""]),
        (mixed_config(tmp_path / "two"), ["counting", "words"]),
    ):
        config.validation = {"fraction": 0.2, "max_packs": max_packs}
        alone = held_out_of(config, World())
        assert list(alone) == names
        OneOfTwo.asked.clear()
        ranks = [held_out_of(config, OneOfTwo(rank=rank, size=2)) for rank in range(2)]
        assert OneOfTwo.asked == ["files of each machine"] * 2 * len(names)
        for name in names:
            whole = rows_of(alone[name])
            assert len(whole) == max_packs
            assert sorted(row for rank in ranks for row in rows_of(rank[name])) == sorted(whole)
            assert {len(rank[name]) for rank in ranks} == {-(-max_packs // (2 * config.batch_size))}
            assert all(
                batch.tokens.shape == (config.batch_size, 32) for rank in ranks for batch in rank[name]
            )


def test_validation_that_holds_out_nothing_or_trains_nothing_is_refused(tmp_path: Path) -> None:
    two, one = mixed_config(tmp_path / "two"), tiny_config(tmp_path / "one")
    for config, of in ((two, " of source 'counting'"), (one, "")):
        config.validation = {"fraction": 1e-9}
        expected = rf"^validation.fraction=1e-09 holds out none of the rows{of}: there are too few, .* give a"
        with pytest.raises(ValueError, match=expected):
            held_out_of(config, World())
    two.validation = {"fraction": {"words": 0.2}}
    assert list(held_out_of(two, World())) == ["words"]

    masked = tmp_path / "masked.jsonl"
    masked.write_text('{"text": "cat"}\n')  # one token, and a first label is never trained
    one.validation = {"source": {"_component_": "streampack.JSONLSource", "paths": str(masked)}}
    one.data.encoder |= {"add_bos": False, "add_eos": False}
    with pytest.raises(
        ValueError, match=r"^the validation rows train nothing in 1 pack\(s\): every label is masked"
    ):
        held_out_of(one, World())


def test_broken_validation_records_have_a_list_of_their_own_and_no_limit(tmp_path: Path) -> None:
    config = mixed_config(tmp_path)
    config.data.skip_bad = {"limit": 1, "folder": str(tmp_path / "bad")}
    config.validation = {"fraction": 0.5, "max_packs": 1000}
    for name in ("counting", "words"):
        path = tmp_path / f"{name}.jsonl"
        path.write_text(path.read_text() + "{broken\n" * 3)
    for rank in range(2):
        held_out_of(config, OneOfTwo(rank=rank, size=2))
    listed = {
        path.relative_to(tmp_path / "bad"): path.read_text() for path in (tmp_path / "bad").rglob("*.jsonl")
    }
    assert {str(path.parent) for path in listed} == {"validation/counting", "validation/words"}
    assert [len(lines.splitlines()) for lines in listed.values()] == [3, 3]


@pytest.mark.parametrize(("epochs", "settings"), [
    (None, {"strategy": "exact_fit"}), (1, {"strategy": "next_fit"}), (None, {"strategy": "next_fit"}),
    (None, {"split_across_pack": True}),
])  # fmt: skip
def test_the_opening_expects_the_padding_that_packs_have(
    tmp_path: Path, epochs: int | None, settings: dict[str, Any]
) -> None:
    lengths = torch.randint(2, 20, (250,), generator=torch.Generator().manual_seed(0)).tolist()
    rows = [{"tokens": [1] * length, "labels": [1] * length} for length in lengths]
    data = IterablePackedDataset(rows, max_seq_len=24, num_lanes=2, epochs=epochs, shuffle=True, **settings)
    changes = {"max_steps": None} if epochs else {}
    config = read_config(
        tiny_config(tmp_path, epochs=epochs, gradient_accumulation_steps=1, validation=None, **changes)
    )
    loader = PackedDataLoader(data, packs_per_step=2)
    line = opening(config, loader, inputs=INPUTS, world=World())["packing"]
    assert line.startswith(
        "split_across_pack" if "split_across_pack" in settings else f"strategy={settings['strategy']}"
    )
    expected = float(re.search(r"about ([\d.]+)% padding", line)[1])  # type: ignore[index]
    for _ in islice(loader, 1_000):  # exact_fit bounds the drift of long pieces less and less
        pass
    assert 100 * loader.ledger().padding == pytest.approx(expected, abs=2)  # of rows in another order
    assert (expected > 5) == (settings.get("strategy") == "next_fit")


@pytest.mark.parametrize(
    ("overlong", "told"),
    [
        ("truncate", ": overlong=truncate loses 26.7% of the tokens"),
        ("drop", ": overlong=drop loses 66.7% of the tokens"),
        ("split", None),
        (
            "error",
            ", 66.7% of the tokens, and the run would stop at the first of them: sample 0 has 40 tokens; set",
        ),
    ],
)
def test_the_opening_tells_what_happens_to_samples_too_long_for_a_pack(
    tmp_path: Path, overlong: str, told: str | None
) -> None:
    rows = [{"tokens": [1] * length, "labels": [1] * length} for length in (40, 10, 10)] * 10
    data = IterablePackedDataset(rows, max_seq_len=24, num_lanes=2, overlong=overlong)
    config = read_config(tiny_config(tmp_path, validation=None))
    lines = opening(config, PackedDataLoader(data), inputs=INPUTS, world=World())
    if told is None:
        assert "overlong" not in lines
    else:
        assert lines["overlong"].startswith(
            f"10 of 30 samples looked at are too long for max_seq_len=24{told}"
        )


def test_the_opening_of_a_resume_counts_what_was_read_once(tmp_path: Path) -> None:
    """Each rank has loaded the lanes of all: their ledgers were added up, twice the tokens on two ranks."""
    rows = [{"tokens": [1] * 8, "labels": [1] * 8}] * 50
    config = read_config(tiny_config(tmp_path, validation=None))
    loader = PackedDataLoader(IterablePackedDataset(rows, max_seq_len=24, num_lanes=2), packs_per_step=2)
    [*islice(loader, 3)]
    again = PackedDataLoader(IterablePackedDataset(rows, max_seq_len=24), packs_per_step=2)
    again.load_state_dict(loader.state_dict())
    lines = opening(config, again, inputs=INPUTS, world=OneOfTwo(size=2), done=3)
    assert lines["so far"] == f"{loader.ledger().tokens_in:,} tokens read, 0 dropped"


@given(st.lists(st.integers(1, 12), min_size=1, max_size=12), st.integers(1, 3), st.booleans())
def test_joined_documents_are_one_sequence(lengths: list[int], size: int, null: bool) -> None:
    rows = [{"tokens": [i] * n, "labels": [i] * n} for i, n in enumerate(lengths, 1)]
    packs = list(IterablePackedDataset(rows, max_seq_len=16, num_lanes=1))[:size]
    apart = collate_packed([*packs, *[to_torchtune(null_pack(16))] * null])
    joined = join_documents(apart)
    for row, pack in enumerate(packs):
        used = sum(pack["seq_lens"].tolist()[: pack["num_seqs"]])
        assert joined.seq_lens[row].tolist() == [used, 16 - used]
        assert joined.input_pos[row].tolist() == [*range(used), *range(16 - used)]
    if null:
        assert (joined.seq_lens[-1].tolist(), joined.input_pos[-1].tolist()) == ([16, 0], [*range(16)])
    assert joined.seq_lens.dtype == torch.int32
    assert joined.fragments == apart.fragments
    assert torch.equal(joined.tokens, apart.tokens)
    assert torch.equal(joined.labels, apart.labels)
    padded = IterablePackedDataset(rows, max_seq_len=16, num_lanes=1, pad_seqs_to=16)
    with pytest.raises(ValueError, match="would attend to that padding; leave pad_seqs_to out"):
        join_documents(collate_packed(list(padded)))


ALPACA = {"instruction": "Add.", "input": "2 and 3", "output": "5"}
PAIR = {"prompt": "Q", "chosen": " A", "rejected": " B"}
DPO = {"_component_": "torchtune.rlhf.loss.DPOLoss"}


def of_rows(folder: Path, rows: list[Any], *, loss: Any = None, **data: Any) -> tuple[Any, Any]:
    """A config whose rows have no encoder, and their tokenizer."""
    tokenizer = HFTokenizer(byte_level())
    config = tiny_config(folder, validation=None, **{"data.max_seq_len": 64, "model.max_seq_len": 64})
    path = folder / "shaped.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    del config.data.encoder
    config.data.source.paths = str(path)
    config.loss = loss
    for key, value in data.items():
        OmegaConf.update(config, f"data.{key}", value, force_add=True)
    return config, tokenizer


@pytest.mark.parametrize(
    ("row", "data", "said"),
    [
        (ALPACA, {}, "rows are Alpaca's: instruction, output, input"),
        (ALPACA, {"encoder": "auto"}, "rows are Alpaca's: instruction, output, input"),
        (
            {"q": "Hi", "a": "Hello"},
            {"columns": {"q": "instruction", "a": "output"}},
            "rows are Alpaca's: q, a",
        ),
        (PAIR, {"loss": DPO}, "rows are preference pairs: chosen, rejected, prompt"),
        ({"text": "Hi"}, {}, "rows are text: text"),
        ({"input_ids": [5, 6]}, {}, "rows are token ids: input_ids"),
    ],
)
def test_the_encoder_follows_from_the_rows(tmp_path: Path, row: Any, data: dict[str, Any], said: str) -> None:
    config, tokenizer = of_rows(tmp_path, [row] * 20, **data)
    train, _ = build_data(read_config(config), tokenizer=tokenizer, vocab_size=400)
    lines = first_look(train.lane_config)
    assert lines[0] == said
    assert any("⟦" in line for line in lines[2:]) == ("input_ids" not in row)
    alone = encoder_for([row], tokenizer, columns=data.get("columns"))
    assert train.lane_config.encode(row).tokens.tolist() == alone(row).tokens.tolist()


@pytest.mark.parametrize(
    ("rows", "data", "fragment"),
    [
        ([PAIR], {}, r"train their bad answers like good ones; run dpo, or name the good ones"),
        ([ALPACA], {"loss": DPO}, "the loss compares two answers; give rows with chosen and rejected"),
        ([ALPACA, ALPACA, PAIR], {}, r"2 of the first 3 rows are Alpaca's.*shaped.jsonl:3 is preference pairs"),
        ([ALPACA], {"encoder": {"_component_": "streampack.ChatEncoder"}, "roles": {"a": "user"}},
         "roles is for rows whose encoder is found by their shape"),
    ],
)  # fmt: skip
def test_rows_that_the_recipe_cannot_train_are_known_before(
    tmp_path: Path, rows: list[Any], data: dict[str, Any], fragment: str
) -> None:
    config, tokenizer = of_rows(tmp_path, rows, **data)
    with pytest.raises(ValueError, match=fragment):
        build_data(read_config(config), tokenizer=tokenizer, vocab_size=400)


def test_each_source_of_a_mixture_has_the_encoder_of_its_rows(tmp_path: Path) -> None:
    config, tokenizer = of_rows(tmp_path, [ALPACA] * 20)
    text = tmp_path / "text.jsonl"
    text.write_text(json.dumps({"text": "one two"}) + "\n")
    kind = "streampack.JSONLSource"
    sources = [
        {"name": name, "weight": 1, "source": {"_component_": kind, "paths": str(path)}}
        for name, path in (("chats", tmp_path / "shaped.jsonl"), ("web", text))
    ]
    config.data.source = {"_component_": "streampack.Mix", "sources": sources, "stop": "never"}
    train, _ = build_data(read_config(config), tokenizer=tokenizer, vocab_size=400)
    lines = [line for line in first_look(train.lane_config) if line.startswith("rows")]
    assert lines == ["rows of chats are Alpaca's: instruction, output, input", "rows of web are text: text"]
