"""Samples with images in packs: both budgets, arrays end to end, positions, state and resume."""

from __future__ import annotations

import copy
import itertools
import multiprocessing as mp
import pickle
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from streampack import (
    Batch,
    FlatteningCollator,
    IterablePackedDataset,
    MapSource,
    MediaSample,
    Mix,
    PackedDataLoader,
    Sample,
    TokensEncoder,
    collate_packed,
    plan_packs,
)
from streampack.lanes import piece_reader
from streampack.packing.two_budgets import choose_within
from streampack.streaming import estimate
from tests.harness.files import listed
from tests.vision.rows import encode, pixels_of, positions_of, row, rows

ROWS = rows(300)
SIZES: dict[str, Any] = {"max_seq_len": 64, "max_media": 40, "encoder": encode, "num_lanes": 6}
BIG = row(9, text=5, grids=[(7, 7)])


def data(given: list[dict[str, Any]] = ROWS, **settings: Any) -> IterablePackedDataset:
    return IterablePackedDataset(MapSource(given), **{**SIZES, **settings})


READS: list[int] = []


def iter_of(given: list[dict[str, Any]]) -> Any:
    """Return an iterable that counts how many rows each of its passes reads."""

    class Stream:
        def __iter__(self) -> Any:
            READS.append(0)
            for each in given:
                READS[-1] += 1
                yield each

    return Stream()


def check(dataset: IterablePackedDataset, batch: Batch, *, pad_seqs_to: int = 1) -> list[int]:
    """Compare a batch with what its rows are made of, laid out anew; return the numbers of the rows."""
    assert batch.media is not None
    assert batch.media.positions is not None
    seen, pixels, grids = [], [], []
    for pack, fragments in enumerate(batch.fragments):
        start = cost = 0
        for number, fragment in enumerate(fragments):
            given = dataset.trace(fragment)["row"]
            seen.append(given["number"])
            own, length = positions_of(given), fragment.stop - fragment.start
            more = own.max() + 1 + np.arange(fragment.length - length)
            own = np.concatenate([own, np.tile(more, (3, 1))], 1)
            assert fragment.length % pad_seqs_to == 0
            there = batch.media.positions[:, pack, start : start + fragment.length].numpy()
            assert np.array_equal(there, own)
            assert batch.media.rows["pixel_values"][pack][number] == len(pixels_of(given))
            assert batch.media.images[pack][number] == len(given["grids"])
            pixels.append(pixels_of(given))
            grids += [(1, *grid) for grid in given["grids"]]
            start, cost = start + fragment.length, cost + len(pixels_of(given))
        assert cost <= SIZES["max_media"]
        left = batch.media.positions[:, pack, start:]
        assert torch.equal(left, torch.arange(left.shape[1]).expand_as(left))
        assert torch.equal(batch.input_pos[pack, start:], torch.arange(left.shape[1]))
    assert np.array_equal(batch.media.tensors["pixel_values"].numpy(), np.concatenate(pixels))
    assert batch.media.tensors["image_grid_thw"].tolist() == [list(grid) for grid in grids]
    return seen


@pytest.mark.parametrize("strategy", ["exact_fit", "best_fit", "first_fit", "next_fit"])
def test_every_image_lies_with_its_tokens(strategy: str) -> None:
    dataset = data(strategy=strategy)
    batches = list(PackedDataLoader(dataset, batch_size=3))
    with_media = [batch for batch in batches if batch.media is not None]
    seen = [number for batch in with_media for number in check(dataset, batch)]
    assert len(with_media) > 20
    rest = [f.row_id[0] for batch in batches if batch.media is None for pack in batch.fragments for f in pack]
    assert sorted([*seen, *rest]) == list(range(300))
    ledger = dataset.ledger()
    images = sum(len(each["grids"]) for each in ROWS)
    assert ledger.images == ledger.as_dict()["images"] == images
    assert ledger.media == ledger.as_dict()["media"] == sum(len(pixels_of(each)) for each in ROWS)


def test_padding_of_sequences_goes_on_on_all_axes() -> None:
    dataset = data(pad_seqs_to=4)
    [batch] = itertools.islice(PackedDataLoader(dataset, batch_size=8), 1)
    check(dataset, batch, pad_seqs_to=4)
    assert any(fragment.padding for pack in batch.fragments for fragment in pack)


def test_a_choice_within_two_budgets_is_as_full_as_an_exhaustive_one() -> None:
    rng, scarce = np.random.default_rng(0), [0, 0]
    for _ in range(200):
        count = int(rng.integers(2, 9))
        sizes = np.stack([rng.integers(1, 12, count), rng.integers(-4, 9, count).clip(0)])
        room = rng.integers([1, 1], [25, 15])
        subsets = [list(c) for n in range(count + 1) for c in itertools.combinations(range(count), n)]
        used = np.array([sizes[:, c].sum(1) for c in subsets])
        used = used[(used <= room).all(1)] / room
        taken = choose_within("exact_fit", *sizes.tolist(), tuple(room.tolist()), 99, lambda: False)
        assert taken == sorted(set(taken))
        mine = sizes[:, taken].sum(1) / room
        assert (used == mine).all(1).any()
        parts = (sizes.sum(1) / room).tolist()
        scarcer = parts.index(max(parts))
        # Each piece of a fuller choice must add an 8th of one of average size, and the other budget counts a 16th; the
        # first pieces may fill the tokens by chance.
        assert mine[0] == 1 or mine[scarcer] >= used[:, scarcer].max() - parts[scarcer] / 8 - 1 / 16
        scarce[scarcer] += mine[scarcer] == used[:, scarcer].max()
    assert min(scarce) > 50, scarce


def test_plans_do_not_depend_on_how_much_was_pulled_and_waiting_is_bounded() -> None:
    rng = np.random.default_rng(1)
    lengths = rng.integers(1, 60, 600).tolist()
    media = [min(40, length) if length % 3 else 0 for length in lengths]
    sizes: dict[str, Any] = {"max_media": 40, "buffer_size": 9}
    for strategy in ("exact_fit", "best_fit", "first_fit"):
        packs = list(plan_packs(lengths, 64, media=media, strategy=strategy, **sizes))
        assert sorted(span.index for pack in packs for span in pack) == list(range(600))
        begun: dict[int, int] = {}
        for number, pack in enumerate(packs):
            assert sum(media[span.index] for span in pack) <= 40
            for span in pack:
                begun[span.index] = number
        # Piece i is pulled when at most 9 wait, so at most 9 packs take older ones first.
        newest = itertools.accumulate((max(span.index for span in pack) for pack in packs), max)
        for number, most in enumerate(newest):
            assert all(begun[index] <= number + 9 for index in range(most + 1))
    # Without media the second budget changes nothing. The bound on long pieces is for one budget only, so none is long.
    short = [1 + length % 16 for length in lengths]
    assert list(plan_packs(short, 64, max_media=10**6)) == list(plan_packs(short, 64))
    assert list(plan_packs(lengths, 64, max_media=10**6, strategy="best_fit")) == list(
        plan_packs(lengths, 64, strategy="best_fit")
    )


def test_text_only_runs_have_neither_media_nor_other_states() -> None:
    text = [each for each in rows(80) if not each["grids"]]
    with_limit, without = data(text), data(text, max_media=None)
    for ours, theirs in zip(with_limit, without, strict=True):
        assert ours.keys() == theirs.keys()
        assert "media" not in ours
        assert torch.equal(ours["tokens"], theirs["tokens"])
    limited, free = (dataset.state_dict() for dataset in (with_limit, without))
    assert free["identity"].keys() == limited["identity"].keys() - {"max_media"}
    assert free["lanes"] == limited["lanes"]
    assert all(len(lane["ledger"]) == 16 for lane in free["lanes"].values())


def equal(ours: Batch, theirs: Batch) -> bool:
    return pickle.dumps(tensors(ours)) == pickle.dumps(tensors(theirs)) and ours.fragments == theirs.fragments


def tensors(batch: Batch) -> dict[str, Any]:
    found = {name: getattr(batch, name).numpy() for name in ("tokens", "labels", "input_pos", "seq_lens")}
    if batch.media is not None:
        found |= {name: tensor.numpy() for name, tensor in batch.media.tensors.items()}
        found["positions"] = batch.media.positions.numpy() if batch.media.positions is not None else None
        found |= {"rows": batch.media.rows, "images": batch.media.images}
    return found


@pytest.mark.parametrize("settings", [{}, {"shuffle": True, "max_media": 36}])
def test_a_resume_at_every_step_decodes_again(settings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    given = rows(120)
    loader = PackedDataLoader(data(given, **settings), batch_size=2)
    states, whole = [loader.state_dict()], []
    for batch in loader:
        whole.append(batch)
        states.append(loader.state_dict())
    assert sum(batch.media is not None for batch in whole) > 10
    for number, state in enumerate(states[:-1]):
        assert all(len(pickle.dumps(lane)) < 2048 for lane in state["lanes"].values())
        if number % 2 == 1:  # half of them without a byte of pixels that wait
            monkeypatch.setattr(piece_reader, "HELD_BYTES", 0)
        resumed = PackedDataLoader(data(given, **settings), batch_size=2)
        resumed.load_state_dict(state)
        rest = list(resumed)
        assert len(rest) == len(whole) - number
        assert all(map(equal, rest, whole[number:]))
        assert resumed.dataset.ledger() == loader.dataset.ledger()
        monkeypatch.undo()


def test_workers_hand_over_the_same_arrays() -> None:
    alone, together = (
        list(PackedDataLoader(data(rows(120)), batch_size=2, num_workers=workers)) for workers in (0, 2)
    )
    assert all(map(equal, together, alone))
    assert len(together) == len(alone) > 10
    [first] = [batch.media for batch in together[:1] if batch.media is not None]
    first.tensors["pixel_values"].add_(1)  # memory of its own


def test_pixels_that_wait_are_bounded_and_decoded_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(piece_reader, "HELD_BYTES", 600)
    calls: list[int] = []

    def counted(given: Any) -> Sample:
        calls.append(given["number"])
        return encode(given)

    dataset = data(encoder=counted, num_lanes=1)
    packs, plain = list(dataset), list(data(num_lanes=1))
    again = len(calls) - len(set(calls))
    assert 50 < again < sum(bool(each["grids"]) for each in ROWS)
    assert all(torch.equal(a["tokens"], b["tokens"]) for a, b in zip(packs, plain, strict=True))
    monkeypatch.undo()
    for start in range(0, len(packs), 3):
        batch = collate_packed(packs[start : start + 3])
        if batch.media is not None:
            check(dataset, batch)

    # Rows of a stream wait themselves, because fetching one reads all before it.
    calls.clear()
    monkeypatch.setattr(piece_reader, "HELD_BYTES", 600)
    stream = IterablePackedDataset(iter_of(ROWS), **{**SIZES, "num_lanes": 1})
    for ours, theirs in zip(stream, plain, strict=True):
        assert torch.equal(ours["tokens"], theirs["tokens"])
    assert [len(ROWS)] == READS

    def changed(given: Any) -> Sample:  # between the reading of a row and its pack
        calls.append(given["number"])
        return encode({**given, "text": given["text"] + (calls.count(given["number"]) > 1)})

    calls.clear()
    monkeypatch.setattr(piece_reader, "HELD_BYTES", 0)
    with pytest.raises(ValueError, match="sample .* made another sample when it was encoded once more"):
        list(data(encoder=changed))


def test_an_image_that_is_gone_while_its_row_waits_without_it_is_a_bad_record(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Its pack is made without it; one that has no other sample is of padding."""
    monkeypatch.setattr(piece_reader, "HELD_BYTES", 0)
    seen: set[int] = set()
    gone = {*range(3, 60, 7)}

    def losing(given: Any) -> Sample:
        if given["number"] in gone & seen:
            raise ValueError("image 0: it is gone")
        seen.add(given["number"])
        return encode(given)

    given = [row(number, text=4, grids=[(5, 6)]) for number in range(60)]  # some fill a pack
    kept = {"num_lanes": 1}
    whole = list(data(given, **kept))
    dataset = data(given, encoder=losing, skip_bad=tmp_path / "bad", **kept)
    packs = list(dataset)
    assert len(packs) == len(whole)
    for ours, theirs in zip(packs, whole, strict=True):
        assert ours["fragments"] == tuple(f for f in theirs["fragments"] if f.row_id[0] not in gone)
    assert sum(not pack["fragments"] for pack in packs) > 0
    assert all((pack["labels"] == -100).all() for pack in packs if not pack["fragments"])
    ledger = dataset.ledger()
    assert (ledger.dropped["removed"], ledger.dropped_samples["bad"]) == (34 * len(gone), len(gone))
    assert [entry["reason"] for entry in listed(tmp_path / "bad")] == [
        "ValueError: image 0: it is gone"
    ] * len(gone)
    seen.clear()
    with pytest.raises(ValueError, match="image 0: it is gone"):
        list(data(given, encoder=losing, **kept))


def test_samples_too_large_for_a_pack() -> None:
    long = row(3, text=70, grids=[(2, 3)])
    for given, tokens, media in ((BIG, 54, 49), (long, 76, 6)):
        with pytest.raises(
            ValueError, match=rf"sample 1: it has {tokens} tokens .* image\(s\) that take {media} rows"
        ):
            list(data([ROWS[0], given], overlong="truncate"))
        skipping = data([ROWS[0], given], skip_bad=True)
        assert len(list(skipping)) == 1
        assert skipping.ledger().dropped_samples["bad"] == 1
        dropping = data([ROWS[0], given], overlong="drop")
        assert len(list(dropping)) == 1
        assert dropping.ledger().dropped["overlong"] == tokens
    with pytest.raises(ValueError, match="such samples are never split"):
        list(data([long], split_across_pack=True, max_media=None))
    with pytest.raises(ValueError, match="or max_media where nothing has images"):
        data([long], split_across_pack=True)


def test_images_of_several_sizes_are_padded_with_zeros() -> None:
    def sized(given: Any) -> Sample:
        made = encode(given)
        if not given["grids"]:
            return made
        [height, width], value = given["grids"][0], given["number"] + 1
        media = {"pixel_values": np.full((1, 3, height, width), value), "image_sizes": [[height, width]]}
        return MediaSample(made.tokens, made.labels, media=media)

    batch = collate_packed(list(data(rows(40), encoder=sized, num_lanes=1)))
    assert batch.media is not None
    assert batch.media.positions is None
    pixels, sizes = batch.media.tensors["pixel_values"], batch.media.tensors["image_sizes"].tolist()
    for image, (height, width) in zip(pixels, sizes, strict=True):
        assert image.sum() == image[0, 0, 0] * 3 * height * width > 0
        assert (image[:, :height, :width] == image[0, 0, 0]).all()
    assert [2, 1] in sizes
    assert [1, 2] in sizes


def test_epochs_are_counted_and_estimated_within_both_budgets(monkeypatch: pytest.MonkeyPatch) -> None:
    tight: dict[str, Any] = {"max_media": 36, "max_seq_len": 200, "num_lanes": 2}
    packs = len(list(data(**tight)))
    assert packs > 1.2 * len(list(data(**tight | {"max_media": None})))
    assert data(**tight).estimate(num_lanes=2).packs == packs
    monkeypatch.setattr(estimate, "COUNTED_ROWS", 0)
    assert data(**tight).estimate(rows=300, num_lanes=2).packs == pytest.approx(packs, abs=2)
    # Samples without images wait until the end of their lane, so how long it is counts.
    scarce = tight | {"max_media": 20, "max_seq_len": 400, "overlong": "drop"}
    packs = len(list(data(**scarce)))
    assert data(**scarce).estimate(rows=300, num_lanes=2).packs == pytest.approx(packs, rel=0.05)


def test_an_estimate_plans_few_packs_where_media_are_scarce(monkeypatch: pytest.MonkeyPatch) -> None:
    """By tokens, 200 packs would take 40 times as many samples."""
    planned, plan = [], estimate.plan_samples

    def counted(*arguments: Any) -> Any:
        for pack in plan(*arguments):
            planned.append(pack)
            yield pack

    monkeypatch.setattr(estimate, "plan_samples", counted)
    monkeypatch.setattr(estimate, "COUNTED_ROWS", 0)
    found = data(rows(2000), max_seq_len=1000, max_media=10, overlong="drop").estimate(rows=20, num_lanes=1)
    assert found.padding > 0.9
    assert 200 <= len(planned) < 300


def test_a_run_goes_on_with_other_settings_and_mixtures_hold_text_and_images() -> None:
    given = rows(120)
    first = data(given)
    seen = [f.row_id[0] for pack in itertools.islice(first, 9) for f in pack["fragments"]]
    longer = data(given, max_seq_len=100, max_media=50)
    longer.continue_from(first.state_dict())
    rest = [f.row_id[0] for pack in longer for f in pack["fragments"]]
    assert sorted([*seen, *rest]) == list(range(120))
    left = sum(len(given[number]["grids"]) for number in rest)
    assert longer.ledger().images == left
    text = [{"input_ids": [20 + i % 5] * (3 + i % 40)} for i in range(90)]
    mix = Mix([
        {"name": "images", "source": given, "weight": 3, "encoder": encode},
        {"name": "text", "source": text, "weight": 2, "encoder": TokensEncoder()},
    ])  # fmt: skip
    both = IterablePackedDataset(mix, max_seq_len=64, max_media=40, num_lanes=2)
    packs = list(both)
    mixed = [p for p in packs if len({f.row_id[0] for f in p["fragments"]}) == 2 and "media" in p]
    assert len(mixed) > 5
    for pack in mixed:
        assert all(f.row_id[0] == 0 for f, seen in zip(pack["fragments"], pack["media"], strict=True) if seen)


def test_a_row_that_waited_and_lost_its_image_is_a_bad_record() -> None:
    gone: set[int] = set()

    def losing(given: Any) -> Sample:
        if given["number"] in gone:
            raise ValueError("image 0: it is gone")
        return encode(given)

    def run() -> IterablePackedDataset:
        return data(rows(60), encoder=losing, num_lanes=1, skip_bad=True)

    first = run()
    packs = itertools.islice(first, 8)
    seen = [f.row_id[0] for pack in packs for f in pack["fragments"]]
    state = first.state_dict()
    waiting = [number for number in range(max(seen)) if number not in seen]
    gone.update(waiting[1:3])
    lost = sum(encode(rows(60)[number]).tokens.size for number in gone)
    resumed = run()
    resumed.load_state_dict(state)
    rest = [f.row_id[0] for pack in resumed for f in pack["fragments"]]
    assert sorted([*seen, *rest]) == sorted(set(range(60)) - gone)
    ledger = resumed.ledger()
    assert (ledger.dropped["removed"], ledger.dropped_samples["bad"]) == (lost, len(gone))


def test_packs_of_images_are_not_planned_far_ahead() -> None:
    assert data(max_seq_len=8192).window_for(8) == 0
    assert data(max_seq_len=8192, max_media=None).window_for(8) == 64
    with pytest.raises(ValueError, match="balance_window=3 with images"):
        data(balance_window=3)


def test_a_worker_makes_few_packs_of_images_ahead() -> None:
    made = mp.Value("i", 0)

    def counted(given: Any) -> Sample:
        with made.get_lock():
            made.value += 1
        tokens = np.arange(10, 74)  # a pack, with more pixels than a pipe holds
        return MediaSample(tokens, tokens, media={"pixel_values": np.zeros((40, 3000), np.float32)})

    whole = data(rows(40), encoder=counted, num_lanes=1, strategy="next_fit", buffer_size=1)
    batches = iter(PackedDataLoader(whole, batch_size=1, num_workers=1))
    next(batches)
    seen = -1
    while seen < (now := made.value):  # until it stands still
        seen = now
        time.sleep(0.5)
    assert 2 <= seen <= 6  # without a limit, nine packs wait
    assert len(list(batches)) == 39


def test_collators_that_know_no_images_fail() -> None:
    packs = [pack for pack in data() if "media" in pack][:2]
    with pytest.raises(ValueError, match="it is a pack of groups, .* or one with images"):
        FlatteningCollator()(packs)
    with pytest.raises(KeyError, match="seq_lens"):
        pytest.importorskip("torchtune.data").padded_collate_packed(packs)


def test_samples_travel_unchecked_and_others_are_copied() -> None:
    class Own(MediaSample):
        pass

    given = Own(
        [7, 7, 5], [-100, -100, 5], media={"pixel_values": np.ones((2, 3))}, positions=[[0, 1, 2]] * 3
    )
    again = copy.deepcopy(given)
    assert type(again) is Own
    assert (again.cost, again.images, again.tokens.tolist()) == (2, 2, [7, 7, 5])
    assert np.array_equal(again.media["pixel_values"], given.media["pixel_values"])
    assert np.array_equal(again.positions, given.positions)
    for wrong, why in (
        ({"media": {}}, "at least one array"),
        ({"positions": [[0.5, 1, 2]]}, "whole numbers"),
        ({"positions": [0, 1, 2]}, r"\[axes, 3\]"),
        ({"media": {"pixel_values": torch.ones(2, 3, dtype=torch.bfloat16)}}, "give float32"),
    ):
        with pytest.raises(ValueError, match=why):
            MediaSample([7, 7, 5], [7, 7, 5], **{"media": {"pixel_values": np.ones((2, 3))}, **wrong})

    class Text(Sample):
        """A sample of a user's own, whose memory is used again."""

    buffer = np.zeros(4, np.int32)

    def reusing(row: Any) -> Sample:
        buffer[:] = row["number"]
        return Text(buffer, buffer)

    packs = IterablePackedDataset(
        MapSource([{"number": i} for i in range(1, 3)]), max_seq_len=8, encoder=reusing
    )
    assert next(iter(packs))["tokens"].tolist() == [1, 1, 1, 1, 2, 2, 2, 2]


def test_a_batch_is_moved_and_not_cast() -> None:
    [batch] = itertools.islice(PackedDataLoader(data(), batch_size=1), 1)
    with pytest.raises(TypeError, match="would be the dtype of ids, too"):
        batch.to(torch.bfloat16)  # type: ignore[arg-type]
