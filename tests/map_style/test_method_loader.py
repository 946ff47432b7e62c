from __future__ import annotations

import warnings
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch

from streampack import IGNORE_INDEX, Batch, method_loader
from streampack.map_style.methods import METHODS, plan_batches
from streampack.packing.batch import null_pack

LIMIT = 32
LENGTHS = [int(length) for length in np.random.default_rng(0).integers(1, LIMIT + 1, 50)]
names = pytest.mark.parametrize("name", METHODS)


def samples_of(lengths: list[int] = LENGTHS) -> list[dict[str, Any]]:
    """Samples of distinct tokens; the first third of each is a prompt."""
    made, at = [], 1
    for length in lengths:
        tokens = list(range(at, at + length))
        prompt = length // 3
        made.append({"tokens": tokens, "labels": [IGNORE_INDEX] * prompt + tokens[prompt:]})
        at += length
    return made


def loader_of(name: str, data: Any = None, **settings: Any) -> Any:
    data = samples_of() if data is None else data
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what `fixed_length` says has a test of its own
        return method_loader(data, method=name, **{"max_seq_len": LIMIT, "batch_size": 4, **settings})


def segments(batch: Batch) -> list[list[tuple[list[int], list[int], list[int]]]]:
    """Per row, the (tokens, labels, positions) of every segment, the padding's too."""
    rows = []
    for tokens, labels, positions, lens in zip(
        batch.tokens, batch.labels, batch.input_pos, batch.seq_lens, strict=True
    ):
        parts = [
            part.split([length for length in lens.tolist() if length]) for part in (tokens, labels, positions)
        ]
        assert sum(lens.tolist()) == tokens.numel()
        rows.append([tuple(part.tolist() for part in segment) for segment in zip(*parts, strict=True)])
    return rows


@names
def test_a_batch_is_what_the_plan_says(name: str) -> None:
    data = samples_of()
    settings = {"max_seq_len": LIMIT, "batch_size": 4, "seed": 3}
    plan = plan_batches(name, LENGTHS, **settings)
    batches = list(loader_of(name, data, seed=3, padding_idx=0))
    assert len(batches) == len(plan)
    for batch, rows in zip(batches, plan, strict=True):
        width = LIMIT if METHODS[name].packed else max(sum(b - a for _, a, b in row) for row in rows)
        assert batch.tokens.shape == batch.labels.shape == batch.input_pos.shape == (len(rows), width)
        assert [[(*f.row_id, f.start, f.stop) for f in row] for row in batch.fragments] == rows
        for found, row in zip(segments(batch), rows, strict=True):
            tokens = [data[index]["tokens"][start:stop] for index, start, stop in row]
            labels = [data[index]["labels"][start:stop] for index, start, stop in row]
            if not METHODS[name].isolated and row:
                tokens, labels = [list(chain(*tokens))], [list(chain(*labels))]
            expected = [
                (ids, [IGNORE_INDEX, *targets[1:]], list(range(len(ids))))
                for ids, targets in zip(tokens, labels, strict=True)
            ]
            if padding := width - sum(map(len, tokens)):
                expected.append(([0] * padding, [IGNORE_INDEX] * padding, list(range(padding))))
            assert found == expected


def test_fixed_length_warns() -> None:
    with pytest.warns(UserWarning, match="see one another") as warned:
        method_loader(samples_of(), method="fixed_length", max_seq_len=LIMIT, batch_size=4)
    assert str(warned[0].message) == (
        "method='fixed_length' lets the samples of a row see one another, which makes a worse model; it is there to be "
        "compared with. Train with 'fixed_length_posid', or a method that cuts no sample"
    )
    assert warned[0].filename == __file__


@pytest.mark.parametrize(("name", "workers"), [("random_padding", 0), ("exact_fit", 0), ("multipack", 1)])
def test_a_resume_goes_on_at_the_next_batch(name: str, workers: int) -> None:
    def tokens(batches: Any) -> list[Any]:
        return [batch.tokens.tolist() for batch in batches]

    first = loader_of(name, num_workers=workers)
    first.sampler.set_epoch(1)
    whole = tokens(first)
    second = loader_of(name)
    second.sampler.set_epoch(1)
    batches = iter(second)
    for _ in range(3):
        next(batches)
    third = loader_of(name, num_workers=workers)
    third.sampler.load_state_dict(second.sampler.state_dict())
    third.sampler.set_epoch(1)
    assert tokens(third) == whole[3:]
    third.sampler.set_epoch(2)
    later = tokens(third)
    assert len(later) == len(third)
    assert later != whole, "each epoch has an order of its own"


@names
def test_ranks_share_the_batches(name: str) -> None:
    settings = {"packs_per_step": 12} if name == "multipack" else {}
    alone = [batch.tokens.tolist() for batch in loader_of(name, **settings)]
    loaders = [loader_of(name, num_replicas=3, rank=rank, batch_size=4, **settings) for rank in range(3)]
    assert len({len(loader) for loader in loaders}) == 1
    rows = sorted(row for loader in loaders for batch in loader for row in batch.tokens.tolist() if any(row))
    assert rows == sorted(row for batch in alone for row in batch if any(row))


def test_a_rank_without_data_gets_padding_that_trains_nothing() -> None:
    last = list(loader_of("minibatch_packing", samples_of([3, 4, 5]), batch_size=3, num_replicas=2, rank=1))
    assert [batch.tokens.tolist() for batch in last] == [[[0]]]
    assert (last[0].num_trained.item(), last[0].num_tokens, last[0].fragments) == (0, 0, ((),))
    packed = list(loader_of("exact_fit", samples_of([3]), num_replicas=2, rank=1))
    assert packed[0].tokens[0].tolist() == null_pack(LIMIT).tokens.tolist()
    assert packed[0].tokens.shape == (4, LIMIT)


def test_rows_may_be_padded_to_a_multiple() -> None:
    for name in ("random_padding", "minibatch_packing"):
        plain, padded = list(loader_of(name)), list(loader_of(name, pad_pack_to=8, padding_idx=9))
        for a, b in zip(plain, padded, strict=True):
            width = a.tokens.shape[1]
            assert b.tokens.shape[1] == -(-width // 8) * 8
            assert b.tokens[:, width:].eq(9).all()
            assert a.num_trained == b.num_trained


def test_known_lengths_are_not_read_again() -> None:
    class Counted(list):  # type: ignore[type-arg]
        read = 0

        def __getitem__(self, index: Any) -> Any:
            self.read += 1
            return super().__getitem__(index)

    data = Counted(samples_of())
    loader_of("multipack", data, lengths=LENGTHS)
    assert data.read == 0
    loader_of("multipack", data)
    assert data.read == len(LENGTHS)


def test_the_global_generators_are_left_alone() -> None:
    torch.manual_seed(0)
    before = torch.get_rng_state()
    list(loader_of("multipack"))
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize(
    ("name", "data", "settings", "message"),
    [
        (
            "multipack",
            iter(samples_of()),
            {},
            "method='multipack' must know all lengths, and a list_iterator has no samples by number (it needs __len__ "
            "and __getitem__); stream it with IterablePackedDataset, whose strategy 'exact_fit' needs none",
        ),
        (
            "random_padding",
            [{"tokens": [1], "labels": [1]}],
            {"lengths": [1, 2]},
            "there are 2 lengths and 1 samples; give one for each",
        ),
        (
            "random_padding",
            [{"tokens": [99], "labels": [99]}],
            {"vocab_size": 50},
            "sample 0: token id 99 is outside the vocabulary of 50 ids (0 to 49); use the model's own tokenizer, or "
            "resize the model's embeddings",
        ),
        (
            "random_padding",
            [{"tokens": [1], "labels": [1]}],
            {"pad_pack_to": 0},
            "pad_pack_to=0 is below 1; give at least 1",
        ),
    ],
)
def test_bad_input_is_refused(name: str, data: Any, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as error:
        loader_of(name, data, **settings)
    assert str(error.value) == message


def test_a_wrong_length_is_found_when_the_sample_is_read() -> None:
    loader = loader_of("random_padding", [{"tokens": [1, 2], "labels": [1, 2]}], lengths=[3])
    with pytest.raises(ValueError) as error:
        next(iter(loader))
    assert str(error.value) == (
        "sample 0 has 2 tokens and 3 were planned; make the dataset give the same sample each time, or correct lengths"
    )
