"""``strategy="padded"``: a sample a pack, in the stream's order, each batch padded to its longest.

The oracle is torch's ``pad_sequence`` over the rows, which lanes that are not shuffled hand out in their order.
"""

from __future__ import annotations

import re
import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest
import torch

from streampack import (
    Batch,
    IterablePackedDataset,
    MapSource,
    PackedDataLoader,
    PackedDataset,
    collate_packed,
)
from streampack.packing.batch import unstack_packs
from streampack.streaming import estimate
from tests.harness import threads
from tests.harness.corpus import Numbers, rows
from tests.harness.groups import Pairs, batch_of, trees
from tests.harness.isolation import masked, rows_of, run_alone, run_packed
from tests.harness.threads import Topology, on_ranks, packs_of
from tests.oracle.packing import pieces
from tests.oracle.padding import padded

ROWS = rows(103, longest=20)
PADDING = 999_999


def stream(data: Any = ROWS, **changes: Any) -> IterablePackedDataset:
    common = {"max_seq_len": 64, "encoder": Numbers(), "num_lanes": 4, "padding_idx": PADDING}
    return IterablePackedDataset(MapSource(data), strategy="padded", **{**common, **changes})


def same(batch: Batch, given: list[dict[str, int]], size: int) -> None:
    """Compare a batch of ``size`` rows with its rows, padded by torch; those behind the last are null packs."""
    samples = [Numbers()(row) for row in given]
    nothing = {"tokens": [PADDING], "labels": [-100]}  # a null pack by itself
    wanted = padded([{"tokens": each.tokens, "labels": each.labels} for each in samples] or [nothing])
    width = wanted["input_ids"].shape[1]
    assert batch.tokens.shape == (size, width)
    for number in range(size):
        length = samples[number].tokens.size if number < len(given) else 0
        tokens, labels, positions = (
            x[number].tolist() for x in (batch.tokens, batch.labels, batch.input_pos)
        )
        assert tokens[length:] == [PADDING] * (width - length)
        assert positions == [*range(length), *range(width - length)]
        assert labels[length:] == [-100] * (width - length)
        if length:
            assert tokens[:length] == wanted["input_ids"][number, :length].tolist()
            assert labels[:length] == wanted["labels"][number, :length].tolist()
        assert [n for n in batch.seq_lens[number].tolist() if n] == [n for n in (length, width - length) if n]
    assert batch.num_tokens == sum(row["n"] for row in given)


@pytest.mark.parametrize(("ranks", "workers"), [(1, 0), (2, 0), (2, 2)])
def test_batches_are_those_of_pad_sequence(ranks: int, workers: int) -> None:
    made = threads.run(stream, Topology(ranks, workers, batch_size=3, batches_per_step=2))
    for rank, batches in enumerate(made.batches):
        own = ROWS[rank::ranks]
        steps = -(-len(ROWS) // (6 * ranks))
        assert len(batches) == 2 * steps
        for number, batch in enumerate(batches):
            same(batch, own[3 * number : 3 * number + 3], 3)
    # Some batch of null packs only, beside one with rows, or the widths of null packs would not be tested.
    assert any(not batch.num_seqs for batch in made.batches[-1])


def test_worker_processes_and_torchs_collator_make_the_same_batches() -> None:
    [here] = threads.run(stream, Topology(batch_size=3)).batches
    there = list(PackedDataLoader(stream(), batch_size=3, num_workers=2))
    assert [batch.tokens.tolist() for batch in there] == [batch.tokens.tolist() for batch in here]
    dicts = list(stream())
    assert [len(pack["tokens"]) for pack in dicts] == [row["n"] for row in ROWS]
    for number, batch in enumerate(here[:-1]):
        again = collate_packed(dicts[3 * number : 3 * number + 3], padding_idx=PADDING)
        for name in ("tokens", "labels", "input_pos", "seq_lens"):
            assert torch.equal(getattr(again, name), getattr(batch, name))
        assert (again.longest, again.fragments) == (batch.longest, batch.fragments)
    # Packs of a batch, stacked with longer ones, have one trailing segment of padding.
    longer = collate_packed(dicts[:3], padding_idx=PADDING)
    assert longer.tokens.shape[1] == max(row["n"] for row in ROWS[:3])


SETTINGS: dict[str, dict[str, Any]] = {
    "shuffled": {"shuffle": True, "epochs": 2},
    "overlong": {"shuffle": True, "epochs": 2, "max_seq_len": 8, "overlong": "split", "pad_seqs_to": 4},
    "balanced": {"balance_window": 5},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_it_resumes_at_every_step_on_any_ranks(name: str) -> None:
    """Steps of four samples: on 2 ranks, then 1, then 2 again."""
    make = lambda: stream(ROWS[:41], **SETTINGS[name])  # noqa: E731
    two, one = Topology(2, 1, batch_size=2), Topology(1, 0, batch_size=4)
    whole = threads.run(make, two)
    wanted = threads.steps_of_run(whole, two)
    threads.check_steps(wanted, make, 4, 4)
    for step in range(1, len(wanted)):
        first = threads.run(make, two, limit=step)
        again = threads.run(make, two, state=first.states[0])
        for resumed, batches in zip(again.batches, whole.batches, strict=True):
            assert [batch.tokens.tolist() for batch in resumed] == [b.tokens.tolist() for b in batches[step:]]
        second = threads.run(make, one, state=first.states[0], limit=1)
        third = threads.run(make, two, state=second.states[0])
        ways = (first, two), (second, one), (third, two)
        threads.check_steps([each for way in ways for each in threads.steps_of_run(*way)], make, 4, 4)


def test_the_same_samples_as_packed_once_each_and_a_ledger_that_adds_up() -> None:
    data = stream(rows(80, overlong=40), max_seq_len=16, overlong="truncate", pad_seqs_to=8, shuffle=True)
    found = sorted((f.row_id, f.start, f.stop) for pack in data for f in pack["fragments"])
    packed = IterablePackedDataset(
        data.lane_config.source, max_seq_len=16, encoder=Numbers(), overlong="truncate", pad_seqs_to=8
    )
    assert found == sorted((f.row_id, f.start, f.stop) for pack in packed for f in pack["fragments"])
    lengths = [row["n"] for row in rows(80, overlong=40)]
    kept = [stop - start for _, start, stop in pieces(lengths, 16, overlong="truncate")]
    ledger = data.ledger()
    assert (ledger.packs, ledger.packed) == (80, sum(kept))
    assert ledger.capacity == sum(-(-n // 8) * 8 for n in kept)
    assert ledger.dropped["truncated"] == sum(lengths) - sum(kept) > 0


def test_a_packed_run_continues_padded() -> None:
    """Samples that waited to be packed come first, and each comes once."""
    packed = IterablePackedDataset(MapSource(ROWS), max_seq_len=64, encoder=Numbers(), num_lanes=4)
    iterator = iter(packed)
    before = [next(iterator) for _ in range(5)]
    after = stream()
    after.continue_from(packed.state_dict())
    rest = list(after)
    seen = [fragment.row_id[0] for pack in [*before, *rest] for fragment in pack["fragments"]]
    assert sorted(seen) == list(range(len(ROWS)))
    assert all(pack["num_seqs"] == 1 for pack in rest)


# Models.


def token_losses(model: torch.nn.Module, batches: list[Batch]) -> dict[tuple[Any, int], torch.Tensor]:
    found = {}
    for batch in batches:
        logits = model(**masked(batch))
        losses = torch.nn.functional.cross_entropy(
            logits[:, :-1].flatten(0, 1), batch.labels[:, 1:].flatten(), reduction="none"
        ).view(len(logits), -1)
        for pack, fragments in enumerate(batch.fragments):
            start = 0
            for fragment in fragments:
                for at in range(1, fragment.stop):
                    found[fragment.row_id, at] = losses[pack, start + at - 1]
                start += fragment.stop
    return found


def test_losses_of_tokens_are_those_of_packs() -> None:
    from tests.harness.tiny_torchtune import build

    model = build("llama3_2")
    given = MapSource(rows_of((5, 32, 1, 17, 9, 2, 23, 12, 3, 8, 20)))
    common: dict[str, Any] = {"max_seq_len": 32, "num_lanes": 1}
    packed, alone = (
        token_losses(
            model, list(PackedDataLoader(IterablePackedDataset(given, strategy=s, **common), batch_size=4))
        )
        for s in ("exact_fit", "padded")
    )
    assert packed.keys() == alone.keys()
    assert len(packed) == sum((5, 32, 1, 17, 9, 2, 23, 12, 3, 8, 20)) - 11
    torch.testing.assert_close(
        torch.stack([packed[key] for key in packed]),
        torch.stack([alone[key] for key in packed]),
        rtol=0,
        atol=1e-5,
    )


def test_a_group_is_one_pack_with_its_shared_prefix() -> None:
    from tests.harness.tiny_torchtune import build

    model = build("llama3_2")
    batch = batch_of(trees(), strategy="padded", max_seq_len=10**6)
    assert batch.tokens.shape == (len(trees()) + 1, max(group.tokens.size for group in trees()))
    ours, theirs = run_packed(model, batch, masked), run_alone(model, batch)
    torch.testing.assert_close(ours.logits, theirs.logits, rtol=0, atol=1e-5)
    torch.testing.assert_close(ours.gradient, theirs.gradient, rtol=0, atol=1e-5)


def test_fields_of_groups_are_nan_in_the_padding() -> None:
    data = IterablePackedDataset(
        MapSource([{"i": i, "n": 6} for i in range(1, 4)] + [{"i": 4, "n": 30}]),
        max_seq_len=64, strategy="padded", encoder=Pairs(), num_lanes=1,
    )  # fmt: skip
    [batch] = PackedDataLoader(data, batch_size=5)
    assert batch.groups is not None
    assert len({pack.tokens.size for pack in data.stream()}) > 1
    for name, values in batch.groups.token_fields.items():
        assert values.shape == batch.tokens.shape
        for number, pack in enumerate(data.stream()):
            if pack.groups is not None:
                own = torch.from_numpy(pack.groups.token_fields[name])
                assert torch.equal(values[number, : len(own)].nan_to_num(), own.nan_to_num())
                assert values[number, len(own) :].isnan().all()


# Memory, estimates, settings.


@pytest.mark.parametrize("groups", [False, True])
def test_nothing_has_the_length_of_max_seq_len(groups: bool) -> None:
    encoder: Any = Pairs() if groups else Numbers()

    def drain() -> int:
        data = stream(ROWS, max_seq_len=10**6, encoder=encoder, padding_idx=3)
        return sum(batch.num_seqs for batch in PackedDataLoader(data, batch_size=8))

    drain()  # imports
    tracemalloc.start()
    assert drain() >= len(ROWS)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1_000_000  # an int8 array of max_seq_len takes as much


def test_an_epoch_is_estimated_by_its_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    data = rows(5000, longest=40)
    config = stream(data, overlong="split", max_seq_len=16).lane_config
    made = len(pieces([row["n"] for row in data], 16, overlong="split"))
    found = estimate.estimate(config, rows=1000, num_lanes=4)
    assert found.samples < 5000, "it was counted"
    assert found.packs == pytest.approx(made, rel=0.05)
    assert abs(found.packs - made) < 4 * found.error
    few = stream(data[:300], overlong="split", max_seq_len=16).lane_config
    counted = len(pieces([row["n"] for row in data[:300]], 16, overlong="split"))
    assert estimate.estimate(few, rows=1000, num_lanes=4)[:2] == (counted, 0.0)


def test_ranks_judge_a_step_alike_whatever_their_widths(caplog: pytest.LogCaptureFixture) -> None:
    """A step whose rows train nothing counts, be they short beside those of another rank or not."""

    def act(sync: threads.ThreadSync) -> str:
        given = [
            {"tokens": [1] * n, "labels": [1 if trained else -100] * n}
            for n, trained in [(30, True), (2, True), (30, False), (2, False), (2, False)]
        ]
        loader = PackedDataLoader(
            IterablePackedDataset(MapSource(given), max_seq_len=64, strategy="padded", num_lanes=2)
        )
        loader.rank_sync = sync
        assert sum(1 for _ in loader) == 3
        with pytest.raises(ValueError, match="trained nothing") as error:
            loader.require_trained()
        return str(error.value)

    first, second = on_ranks(2, act)
    assert first == second
    assert first.startswith("2 of 3 step(s) trained nothing")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: stream(buffer_size=64), "buffer_size=64 has no effect with strategy='padded'"),
        (lambda: stream(max_seqs_per_pack=2), "max_seqs_per_pack=2 has no effect with strategy='padded'"),
        (
            lambda: stream(split_across_pack=True),
            "strategy='padded' has no effect with split_across_pack=True",
        ),
        (
            lambda: PackedDataset([{"tokens": [1]}], max_seq_len=4, strategy="padded"),
            "strategy='padded' makes packs",
        ),
        (lambda: list(stream([{"i": 1, "n": 65}])), "has 65 tokens, max_seq_len is 64"),
    ],
)
def test_what_cannot_be_is_refused(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        make()


def test_the_stream_keeps_its_order_unless_a_window_is_set() -> None:
    assert stream(max_seq_len=131_072).window_for(8) == 0
    data = stream(ROWS[:40], balance_window=10, num_lanes=1)
    lengths = [sum(map(len, pack["tokens"][None])) for pack in data]
    assert sorted(lengths) == sorted(row["n"] for row in ROWS[:40])
    assert lengths != [row["n"] for row in ROWS[:40]]


def test_batches_of_images_are_padded_to_the_longest() -> None:
    from tests.vision.rows import rows as images
    from tests.vision.test_packs import check
    from tests.vision.test_packs import data as with_images

    dataset = with_images(images(40), strategy="padded", max_seq_len=10**6, max_media=40)
    seen = []
    for batch in PackedDataLoader(dataset, batch_size=7):
        if batch.media is not None:
            seen += check(dataset, batch)
        used = [pack.seq_lens[0] for pack in unstack_packs(batch)]
        assert batch.tokens.shape == (7, max(used))
    assert len(seen) > 30
    assert packs_of(batch)
