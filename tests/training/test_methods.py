"""``data.method`` of a config: the methods of batching in recipes, and exact resumes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from streampack_recipes.full_finetune import train
from streampack_recipes.lora_finetune import train as train_lora

from streampack import IterablePackedDataset, MapSource, Mix, PackedDataLoader
from streampack.distributed.rank_sync import OtherRankFailed
from streampack.distributed.world import World, join_world
from streampack.map_style.methods import METHODS
from streampack.training.config import read_config
from streampack.training.methods import MethodLoader, read_pieces
from tests.harness.processes import RankError, run_ranks
from tests.harness.tiny import losses, tiny_config
from tests.recipes.test_lora_finetune import lora_config

LENGTHS = [7, 3, 8, 1, 5, 2, 6, 4, 8, 3, 2, 7, 1]


def dataset(**settings: Any) -> IterablePackedDataset:
    rows = [{"tokens": [i + 1] * n, "labels": [i + 1] * n} for i, n in enumerate(LENGTHS)]
    return IterablePackedDataset(MapSource(rows), **{"max_seq_len": 8, **settings})


class Imagined(World):
    """A rank without other processes: it gathers its own value from each of them."""

    def gather(self, value: Any) -> list[Any]:
        return [value] * self.size

    @contextmanager
    def together(self) -> Iterator[None]:
        yield


def seen(batches: Any) -> Counter[int]:
    """Count the tokens of each sample."""
    return Counter(token - 1 for batch in batches for token in batch.tokens.flatten().tolist() if token)


@pytest.mark.filterwarnings("ignore:method='fixed_length' lets:UserWarning")
@pytest.mark.parametrize("name", ["random_padding", "fixed_length"])
def test_the_recipe_trains_every_sample_once_an_epoch(tmp_path: Path, name: str) -> None:
    config = tiny_config(
        tmp_path,
        rows=60,
        max_steps=None,
        epochs=2,
        batch_size=4,
        checkpoint_every=None,
        **{"data.method": name},
    )
    result = train(config)
    ledger = result["ledger"]
    assert ledger.tokens_in == ledger.packed == result["tokens"]
    assert ledger.buffered == 0
    assert ledger.samples % 2 == 0
    assert result["held_out"][-1][1] < result["held_out"][0][1] - 0.1
    assert (ledger.packs == ledger.samples) == (name == "random_padding")


def test_a_flattened_mini_batch_trains_as_a_padded_one(tmp_path: Path) -> None:
    """Rows of four samples of up to 32 tokens go through a model for 32."""
    for name in ("random_padding", "minibatch_packing"):
        train(tiny_config(tmp_path / name, batch_size=4, **{"data.method": name}))
    padded, packed = (losses(tmp_path / name) for name in ("random_padding", "minibatch_packing"))
    assert list(padded) == list(packed) == list(range(1, 13))
    assert [float(v) for v in packed.values()] == pytest.approx([float(v) for v in padded.values()], abs=1e-5)


def test_the_lora_recipe_takes_methods_too(tmp_path: Path) -> None:
    result = train_lora(lora_config(tmp_path, max_steps=2, **{"data.method": "multipack"}))
    assert result["step"] == 2


def test_a_resumed_run_has_the_same_losses(tmp_path: Path) -> None:
    changes = {
        "lr_scheduler": None,
        "num_workers": 2,
        "data.method": "multipack",
        "rows": 40,
        "validation": None,
    }
    train(tiny_config(tmp_path / "whole", max_steps=12, **changes))
    train(tiny_config(tmp_path / "parts", max_steps=5, **changes))
    result = train(tiny_config(tmp_path / "parts", max_steps=12, resume=True, **changes))
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
    ledger = result["ledger"]
    assert ledger.buffered > 0
    assert ledger.packed == result["tokens"]


def test_a_checkpoint_of_another_method_or_corpus_is_refused(tmp_path: Path) -> None:
    changes = {"max_steps": 4, "validation": None, "resume": True}
    train(tiny_config(tmp_path, **changes, **{"data.method": "multipack"}))
    with pytest.raises(ValueError, match="is of method='multipack' and this run has method='exact_fit'"):
        train(tiny_config(tmp_path, **changes, **{"data.method": "exact_fit"}))
    with pytest.raises(ValueError, match="made with method='multipack', whose batches no stream makes"):
        train(tiny_config(tmp_path, **changes))
    with (tmp_path / "rows.jsonl").open("a") as file:
        file.write('{"text": "cat"}\n')
    with pytest.raises(ValueError, match=r"made with another corpus: .*rows\.jsonl is another file"):
        train(tiny_config(tmp_path, **changes | {"max_steps": 5}, **{"data.method": "multipack"}))


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.filterwarnings("ignore:method='fixed_length' lets:UserWarning")
def test_every_batch_from_every_state(name: str) -> None:
    def loader() -> MethodLoader:
        return MethodLoader(dataset(epochs=2), method=name, batch_size=2, packs_per_step=4)

    first = loader()
    batches, states = [], [first.state_dict()]
    for batch in first:
        batches.append(batch)
        states.append(first.state_dict())
    assert seen(batches) == {i: 2 * n for i, n in enumerate(LENGTHS)}
    assert len(batches) % first.batches_per_step == 0, "the last step of an epoch is filled up"
    for cut, state in enumerate(states):
        later = loader()
        later.load_state_dict(state)
        rest = list(later)
        assert [b.tokens.tolist() for b in rest] == [b.tokens.tolist() for b in batches[cut:]]
        assert later.ledger() == first.ledger()
        assert later.state_dict() == states[-1]


@pytest.mark.parametrize("name", ["random_padding", "minibatch_packing", "multipack", "exact_fit"])
def test_ranks_share_every_step_and_may_become_fewer(name: str) -> None:
    def loader(rank: int, size: int) -> MethodLoader:
        return MethodLoader(
            dataset(epochs=2), method=name, packs_per_step=4, world=Imagined(rank=rank, size=size)
        )

    alone = loader(0, 1)
    steps = alone.batches_per_step
    whole, states = [], []
    for batch in alone:
        whole.append(batch)
        states.append(alone.state_dict())
    two = [loader(rank, 2) for rank in range(2)]
    streams = [iter(each) for each in two]
    shared = [[batch for stream in streams for batch in islice(stream, 2)] for _ in range(2)]
    for number, step in enumerate(shared):
        assert seen(step) == seen(whole[number * steps : (number + 1) * steps])
    assert two[1].ledger().numbers() == [0] * len(two[1].ledger().numbers())
    later = loader(0, 1)
    later.load_state_dict(two[0].state_dict())
    assert two[0].state_dict() == two[1].state_dict() | {"ledger": two[0].state_dict()["ledger"]}
    assert [seen([b]) for b in later] == [seen([b]) for b in whole[2 * steps :]]
    assert later.ledger() == alone.ledger()
    more = [loader(rank, 2) for rank in range(2)]
    for each in more:
        each.load_state_dict(states[steps - 1])  # after the first step
    shared = [batch for each in more for batch in each]
    assert seen(shared) == seen(whole[steps:])
    assert more[0].ledger() == alone.ledger()
    assert more[0].state_dict() == alone.state_dict()


@pytest.mark.parametrize(
    ("settings", "kept", "dropped"),
    [
        ({"overlong": "truncate"}, [5, 4, 5], {"truncated": 4}),
        ({"overlong": "truncate", "truncate_side": "left"}, [5, 4, 5], {"truncated": 4}),
        ({"overlong": "truncate", "truncate_eos": 99}, [5, 4, 5], {"truncated": 4}),
        ({"overlong": "drop"}, [4, 5], {"overlong": 9}),
        ({"overlong": "split"}, [9, 4, 5], {}),
    ],
)
def test_overlong_samples_are_treated_as_in_a_stream(
    settings: dict[str, Any], kept: list[int], dropped: dict[str, int]
) -> None:
    tokens = [[10 * i + j for j in range(n)] for i, n in enumerate([9, 4, 5], start=1)]
    rows = [{"tokens": ids, "labels": ids} for ids in tokens]
    data = IterablePackedDataset(rows, max_seq_len=5, **settings)
    pieces, ledger = read_pieces(data, world=World())
    assert [piece.sample.tokens.size for piece in pieces] == kept
    assert {reason: count for reason, count in ledger.dropped.items() if count} == dropped
    loader = MethodLoader(data, method="random_packing")
    batches = list(loader)
    assert sum(batch.num_tokens for batch in batches) == sum(kept) == loader.ledger().packed
    streamed = IterablePackedDataset(rows, max_seq_len=5, **settings)
    assert seen(batches) == Counter(
        token - 1 for pack in streamed for token in pack["tokens"].tolist() if token
    )


def test_bad_records_are_skipped(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"tokens": [1, 2], "labels": [1, 2]}\n{"tok\n{"tokens": [3], "labels": [3]}\n')
    settings = {"max_seq_len": 8, "num_lanes": 1}
    with pytest.raises(ValueError, match=r"rows\.jsonl:2"):
        MethodLoader(IterablePackedDataset(path, **settings), method="exact_fit")
    data = IterablePackedDataset(path, **settings, on_bad_record="skip", quarantine=tmp_path / "bad")
    loader = MethodLoader(data, method="exact_fit")
    assert [batch.num_tokens for batch in loader] == [3]
    assert loader.ledger().dropped_samples["bad"] == 1
    assert len((tmp_path / "bad" / "lane-00000.jsonl").read_text().splitlines()) == 1


@pytest.mark.parametrize(
    ("settings", "options", "message"),
    [
        ({}, {"method": "padding"}, "method='padding' is unknown"),
        ({"split_across_pack": True}, {"method": "multipack"}, "cuts no sample at the end of a row"),
        ({}, {"method": "multipack", "batch_size": 2, "packs_per_step": 3}, "is no multiple of 2"),
        ({"max_seq_len": 6}, {"method": "random_padding"}, "sample 0 has 7 tokens, max_seq_len is 6"),
        ({"max_seqs_per_pack": 2}, {"method": "multipack"}, "fills rows whatever the number of sequences"),
        ({"pad_seqs_to": 4}, {"method": "multipack"}, "lays samples end to end, and pad_seqs_to=4 pads each"),
    ],
)
def test_bad_settings(settings: dict[str, Any], options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MethodLoader(dataset(**settings), **options)
    mix = Mix([{"name": "a", "source": [{"tokens": [1], "labels": [1]}], "weight": 1}])
    with pytest.raises(ValueError, match="a mixture is drawn as it streams"):
        MethodLoader(IterablePackedDataset(mix, max_seq_len=8), method="multipack")


def test_rows_of_other_lengths_are_padded_to_the_multiple_of_packs() -> None:
    for method in ("random_padding", "minibatch_packing", "exact_fit"):
        loader = MethodLoader(dataset(max_seq_len=16, pad_pack_to=16), method=method, batch_size=3)
        assert {batch.tokens.shape[1] % 16 for batch in loader} == {0}, method


def test_padding_and_seed_are_those_of_the_dataset() -> None:
    def rows(**settings: Any) -> list[list[int]]:
        loader = MethodLoader(dataset(vocab_size=99, **settings), method="random_padding", batch_size=4)
        return [row for batch in loader for row in batch.tokens.tolist()]

    assert any(row[-1] == 77 for row in rows(padding_idx=77))
    assert sorted(rows(seed=1), key=max) != rows(seed=1) != rows(seed=2)


@pytest.mark.parametrize("overlong", ["drop", "truncate", "split"])
def test_fragments_lead_back_to_their_rows(tmp_path: Path, overlong: str) -> None:
    path = tmp_path / "rows.jsonl"
    lengths = [9, 3, 12, 4, 5, 9, 2]
    rows = [[100 * i + j for j in range(n)] for i, n in enumerate(lengths, start=1)]
    path.write_text("".join(f'{{"tokens": {row}, "labels": {row}}}\n' for row in rows))
    data = IterablePackedDataset(path, max_seq_len=8, overlong=overlong, truncate_side="left", num_lanes=1)
    found = []
    for batch in MethodLoader(data, method="exact_fit", batch_size=2):
        for tokens, fragments in zip(batch.tokens.tolist(), batch.fragments, strict=True):
            for fragment in fragments:
                length = fragment.stop - fragment.start
                traced = data.trace(fragment)
                assert traced["tokens"] == tokens[:length]
                assert traced["row"]["tokens"][fragment.start : fragment.stop] == tokens[:length]
                found += tokens[:length]
                tokens = tokens[length:]
    expected = {
        "drop": [t for row in rows if len(row) <= 8 for t in row],
        "truncate": [t for row in rows for t in row[-8:]],
        "split": [t for row in rows for t in row],
    }
    assert sorted(found) == sorted(expected[overlong])


def test_an_iteration_goes_on_behind_the_last_batch_that_was_handed_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole = [batch.tokens.tolist() for batch in MethodLoader(dataset(epochs=2), method="random_packing")]
    loader = MethodLoader(dataset(epochs=2), method="random_packing")
    found = [batch.tokens.tolist() for _, batch in zip(range(3), loader, strict=False)]
    with monkeypatch.context() as patch:
        patch.setattr(loader.loader.dataset, "width", lambda batch: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            next(iter(loader))
    found += [batch.tokens.tolist() for batch in loader]
    assert found == whole
    assert list(loader) == []


def test_settings_without_effect_on_a_method_may_change() -> None:
    with pytest.raises(ValueError, match="the state is of a stream and this run has method='multipack'"):
        MethodLoader(dataset(), method="multipack").load_state_dict(PackedDataLoader(dataset()).state_dict())
    state = MethodLoader(dataset(strategy="next_fit", shuffle=True), method="multipack").state_dict()
    MethodLoader(dataset(buffer_size=7), method="multipack").load_state_dict(state)
    with pytest.raises(ValueError, match="made with overlong='error' and this dataset has overlong='drop'"):
        MethodLoader(dataset(overlong="drop"), method="multipack").load_state_dict(state)


def test_where_rows_cut_samples_none_is_too_long(tmp_path: Path) -> None:
    config = tiny_config(
        tmp_path, max_steps=2, **{"data.method": "fixed_length_posid", "data.max_seq_len": 16}
    )
    assert train(config)["step"] == 2
    config = tiny_config(tmp_path / "no", max_steps=2, **{"data.method": "multipack", "data.max_seq_len": 16})
    with pytest.raises(ValueError, match="tokens, max_seq_len is 16"):
        train(config)


def test_a_flattened_row_is_never_one_sequence(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, document_masking=False, **{"data.method": "minibatch_packing"})
    with pytest.raises(ValueError, match="document_masking=False makes one sequence of the samples"):
        read_config(config)


def test_a_method_has_no_window_of_packs(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, **{"data.method": "multipack", "data.balance_window": 8})
    with pytest.raises(ValueError, match=r"data.balance_window=8 orders the packs of a stream"):
        read_config(config)


def read_as_a_rank(folder: Path) -> list[int]:
    """Rank 1 has a copy of the corpus without its last rows."""
    with join_world(torch.device("cpu")) as world:
        data = IterablePackedDataset(
            folder / f"{world.rank}" / "rows.jsonl",
            max_seq_len=8,
            on_bad_record="skip",
            quarantine=folder / "bad",
        )
        return [batch.num_tokens for batch in MethodLoader(data, method="multipack", world=world)]


def test_ranks_that_read_different_samples_are_refused(tmp_path: Path) -> None:
    for rank, rows in enumerate((LENGTHS, LENGTHS[:-2])):
        (tmp_path / f"{rank}").mkdir()
        lines = [f'{{"tokens": {[i + 1] * n}, "labels": {[i + 1] * n}}}\n' for i, n in enumerate(rows)]
        (tmp_path / f"{rank}" / "rows.jsonl").write_text("".join(lines))
    with pytest.raises(RankError) as failed:
        run_ranks(read_as_a_rank, 2, tmp_path)
    assert "rank 1 reads 11 samples of 49 tokens" in str(failed.value)
    assert "rank 0 reads 13 samples of 57 tokens" in str(failed.value)


def fail_as_a_rank(folder: Path) -> str:
    """Rank 1 cannot read its copy."""
    with join_world(torch.device("cpu"), timeout=20) as world:
        data = IterablePackedDataset(folder / f"{world.rank}" / "rows.jsonl", max_seq_len=8)
        try:
            MethodLoader(data, method="multipack", world=world)
        except (ValueError, OtherRankFailed) as error:
            return str(error)
    return ""


def test_a_rank_that_cannot_read_fails_all_at_once(tmp_path: Path) -> None:
    for rank, line in enumerate(('{"tokens": [1, 2], "labels": [1, 2]}\n', "{broken\n")):
        (tmp_path / f"{rank}").mkdir()
        (tmp_path / f"{rank}" / "rows.jsonl").write_text(line)
    other, own = run_ranks(fail_as_a_rank, 2, tmp_path)
    assert other.startswith("rank 1 failed: ValueError: ")
    assert "rows.jsonl:1" in own


def test_every_broken_record_is_listed_once_by_all_ranks(tmp_path: Path) -> None:
    for rank in range(2):
        (tmp_path / f"{rank}").mkdir()
        lines = ['{"tokens": [1, 2], "labels": [1, 2]}\n', "{broken\n"] * 3
        (tmp_path / f"{rank}" / "rows.jsonl").write_text("".join(lines))
    assert sum(map(sum, run_ranks(read_as_a_rank, 2, tmp_path))) == 6
    assert len((tmp_path / "bad" / "lane-00000.jsonl").read_text().splitlines()) == 3


def test_as_many_broken_records_as_in_all_lanes(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"tokens": [1, 2], "labels": [1, 2]}\n{broken\n' * 6)
    for lanes, fits in ((3, True), (2, False)):
        data = IterablePackedDataset(
            path, max_seq_len=8, num_lanes=lanes, on_bad_record="skip", max_bad_records=2
        )
        if fits:
            assert MethodLoader(data, method="exact_fit").steps_per_epoch == 2
        else:
            with pytest.raises(ValueError, match="has skipped 4 others"):
                MethodLoader(data, method="exact_fit")
