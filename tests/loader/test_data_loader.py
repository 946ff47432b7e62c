import json
from itertools import islice

import pytest
import torch

from streampack import IterablePackedDataset, PackedDataLoader
from streampack.packing.batch import Batch
from streampack.streaming.lane_state import LaneState


def rows(count=300):
    return [{"tokens": [i] * (i * 7 % 13 + 1), "labels": [i] * (i * 7 % 13 + 1)} for i in range(1, count + 1)]


def dataset(**kwargs):
    settings = {"max_seq_len": 16, "buffer_size": 8, "num_lanes": 12, "shuffle": True, "epochs": 2} | kwargs
    return IterablePackedDataset(rows(), **settings)


def same(left: Batch, right: Batch) -> bool:
    return (
        all(
            torch.equal(getattr(left, name), getattr(right, name))
            for name in ("tokens", "labels", "input_pos", "seq_lens")
        )
        and left.fragments == right.fragments
    )


def samples(batches):
    """Every whole sample that came, by its token."""
    return sorted(
        int(batch.tokens[i, 0 if j == 0 else int(batch.seq_lens[i, :j].sum())])
        for batch in batches
        for i, fragments in enumerate(batch.fragments)
        for j in range(len(fragments))
    )


def test_a_state_is_read_once(monkeypatch):
    """With ten thousand lanes it is most of what a resume waits for."""
    loader = PackedDataLoader(dataset(), batch_size=2)
    list(islice(loader, 9))
    state, read, from_dict = loader.state_dict(), [], LaneState.from_dict
    monkeypatch.setattr(LaneState, "from_dict", lambda found: read.append(found) or from_dict(found))
    again = PackedDataLoader(dataset(), batch_size=2)
    again.load_state_dict(state)
    next(iter(again))
    assert read == [*state["lanes"].values()]


@pytest.mark.parametrize(("num_lanes", "num_workers"), [(12, 1), (12, 3), (5, 2)])
def test_the_order_does_not_depend_on_the_number_of_workers(num_lanes, num_workers):
    """Nor does a number that does not divide the lanes warn."""
    alone = list(PackedDataLoader(dataset(num_lanes=num_lanes), batch_size=3))
    together = list(PackedDataLoader(dataset(num_lanes=num_lanes), batch_size=3, num_workers=num_workers))
    assert len(alone) == len(together)
    assert all(map(same, alone, together))


def test_every_sample_once_an_epoch_and_no_batch_mixes_epochs():
    batches = list(PackedDataLoader(dataset(), batch_size=7, packs_per_step=21))
    assert len(batches) % 3 == 0
    assert all(batch.tokens.shape == (7, 16) for batch in batches)
    half = len(batches) // 2
    assert samples(batches[:half]) == samples(batches[half:]) == list(range(1, 301))


def test_an_epoch_is_filled_with_null_packs_that_train_nothing():
    [last] = PackedDataLoader(IterablePackedDataset(rows(3), max_seq_len=64), batch_size=4)
    assert [len(f) for f in last.fragments] == [3, 0, 0, 0]
    assert (last.labels[1:] == -100).all()
    assert last.seq_lens[1:, 0].tolist() == [64, 64, 64]


@pytest.mark.parametrize(("before", "after"), [(0, 0), (2, 3)])
def test_resumes_at_batches_with_any_number_of_workers(before, after):
    whole = list(PackedDataLoader(dataset(), batch_size=3))
    stops = range(1, len(whole), 4 if before == after == 0 else 40)
    for stop in stops:
        first = PackedDataLoader(dataset(), batch_size=3, num_workers=before)
        iterator = iter(first)
        for _ in range(stop):
            next(iterator)
        second = PackedDataLoader(dataset(), batch_size=3, num_workers=after)
        second.load_state_dict(first.state_dict())
        rest = list(second)
        assert len(rest) == len(whole) - stop
        assert all(map(same, rest, whole[stop:]))


def test_a_state_counts_the_batches_that_were_returned():
    loader = PackedDataLoader(dataset(), batch_size=2, num_workers=2, prefetch_factor=8)
    batch = next(iter(loader))
    assert loader.ledger().packs == 2
    assert loader.ledger().packed == batch.num_tokens


def test_the_ledger_at_the_end_of_an_epoch():
    loader = PackedDataLoader(dataset(epochs=1), batch_size=3, num_workers=2)
    batches = list(loader)
    ledger = loader.ledger()
    assert ledger.tokens_in == sum(len(row["tokens"]) for row in rows())
    assert ledger.packed == ledger.tokens_in == sum(batch.num_tokens for batch in batches)
    assert ledger.buffered == 0
    assert ledger.samples == 300


def test_epoch_is_that_of_the_last_batch():
    loader = PackedDataLoader(dataset(), batch_size=3)
    seen = [loader.epoch for _ in loader]
    assert seen == sorted(seen)
    assert set(seen) == {0, 1}


def test_a_bad_row_in_a_worker_names_its_place():
    data = [*rows(40), {"tokens": [1], "labels": [1, 2]}]
    loader = PackedDataLoader(IterablePackedDataset(data, max_seq_len=16, num_lanes=1), num_workers=1)
    with pytest.raises(ValueError, match="sample 40: 'tokens' has 1 entries and 'labels' has 2"):
        list(loader)


def test_a_bad_row_raises_again_when_asked_again():
    data = [*rows(10), {"tokens": [1], "labels": [1, 2]}, *rows(10)]
    iterator = iter(PackedDataLoader(IterablePackedDataset(data, max_seq_len=16, num_lanes=1)))
    for _ in range(2):
        with pytest.raises(ValueError, match="sample 10"):
            for _ in range(30):
                next(iterator)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"batch_size": 0}, "batch_size=0 is below 1"),
        ({"num_workers": -1}, "num_workers=-1 is below 0"),
        ({"prefetch_factor": 0}, "prefetch_factor=0"),
        ({"packs_per_step": 0}, "packs_per_step=0"),
    ],
)
def test_settings_are_checked(setting, message):
    with pytest.raises(ValueError, match=message):
        PackedDataLoader(dataset(), **setting)


def test_more_workers_than_lanes_is_refused():
    with pytest.raises(ValueError, match="4 lanes cannot feed 5 consumers"):
        iter(PackedDataLoader(dataset(num_lanes=4), num_workers=5))


def test_workers_take_turns_with_an_iterable_and_one_log_line_says_so(caplog):
    from streampack import IterableSource

    for workers, said in ((0, []), (1, []), (2, [SHARED])):
        caplog.clear()
        data = IterablePackedDataset(IterableSource(rows), max_seq_len=16)
        loader = PackedDataLoader(data, num_workers=workers)
        assert samples(loader) == list(range(1, 301))
        assert samples(loader) == list(range(1, 301)), "a second epoch"
        assert [r.getMessage() for r in caplog.records if r.name == "streampack.streaming.dataset"] == said


SHARED = "1 iterable is shared by 2 lanes: each is read by 2 of them, which take turns with its rows"


def test_a_batch_traces_to_file_row_and_text(tmp_path):
    from streampack import JSONLSource, TextEncoder
    from tests.harness.tiny import WordTokenizer, write_rows

    source = JSONLSource(write_rows(tmp_path / "rows.jsonl", 50))
    data = IterablePackedDataset(source, max_seq_len=24, encoder=TextEncoder(WordTokenizer()), shuffle=True)
    lines = (tmp_path / "rows.jsonl").read_text().splitlines()
    traced = 0
    for batch in PackedDataLoader(data, batch_size=2, num_workers=2):
        for fragments in batch.fragments:
            for found in map(data.trace, fragments):
                path, line = found["place"].rsplit(":", 1)
                assert path == str(tmp_path / "rows.jsonl")
                assert json.loads(lines[int(line) - 1]) == found["row"]
                assert found["text"] == found["row"]["text"]
                traced += 1
    assert traced == 50


def test_null_packs_of_every_step_are_logged(caplog):
    loader = PackedDataLoader(dataset(), batch_size=4, packs_per_step=7)
    assert (loader.packs_per_step, loader.batches_per_step, loader.packs_per_batch) == (7, 2, 4)
    first = list(islice(loader, 2))
    assert [sum(map(bool, batch.fragments)) for batch in first] == [4, 3]
    assert [
        record.getMessage() for record in caplog.records if record.name == "streampack.loader.batching"
    ] == [
        "packs_per_step=7 cannot be shared out evenly over 1 rank(s) in batches of 4: every step holds 1 null packs, "
        "which cost time and train nothing; a multiple of 4 holds none"
    ]


@pytest.mark.parametrize(("packs_per_step", "sizes"), [(3, [3]), (9, [3, 3, 3])])
def test_batches_are_smaller_where_that_needs_no_null_packs(caplog, packs_per_step, sizes):
    loader = PackedDataLoader(dataset(), batch_size=4, packs_per_step=packs_per_step)
    first = list(islice(loader, len(sizes)))
    assert [len(batch.tokens) for batch in first] == sizes
    assert all(all(batch.fragments) for batch in first)
    assert not [record for record in caplog.records if record.name == "streampack.loader.batching"]


@pytest.mark.parametrize("slot", [-1, 2**63, "1", True])
def test_a_damaged_slot_is_refused(slot):
    loader = PackedDataLoader(dataset())
    with pytest.raises(ValueError, match="the state is damaged: slot .* is no number of packs"):
        loader.load_state_dict({**loader.state_dict(), "slot": slot})


def test_a_state_that_contains_itself_is_refused():
    """A changed byte of a pickled state may make a reference to the state itself."""
    loader = PackedDataLoader(dataset())
    state = loader.state_dict()
    state["lanes"] = state
    with pytest.raises(ValueError, match="the state is damaged: it contains itself; resume from another"):
        loader.load_state_dict(state)


def test_with_a_limit_of_sequences_all_batches_have_one_shape():
    loader = PackedDataLoader(dataset(max_seqs_per_pack=3), batch_size=4)
    batches = list(loader)
    assert {tuple(batch.seq_lens.shape) for batch in batches} == {(4, 4)}
    assert max(len(pack) for batch in batches for pack in batch.fragments) == 3
    half = len(batches) // 2
    assert samples(batches[:half]) == samples(batches[half:]) == list(range(1, 301))
    free = {tuple(batch.seq_lens.shape) for batch in PackedDataLoader(dataset(), batch_size=4)}
    assert len(free) > 1
    assert max(free)[1] > 4


def test_repr():
    data = IterablePackedDataset([{"tokens": [1], "labels": [1]}], max_seq_len=8)
    loader = PackedDataLoader(data, batch_size=2, num_workers=1, packs_per_step=4)
    assert repr(loader) == f"<PackedDataLoader: batches of 2, 4 packs a step, 1 worker(s), of {data!r}>"
    assert repr(PackedDataLoader(data)) == f"<PackedDataLoader: batches of 1, 0 worker(s), of {data!r}>"
