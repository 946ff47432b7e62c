"""Training data and held-out packs of a config, on one rank and on several."""

from __future__ import annotations

import re
from collections import Counter
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from streampack import IterablePackedDataset, PackedDataLoader
from streampack.distributed.world import World, join_world
from streampack.packing.batch import Batch
from streampack.tokenize import tokenize
from streampack.training.config import read_config
from streampack.training.data import build_data
from streampack.training.estimate import opening, total_steps
from tests.harness.processes import RankError, run_ranks
from tests.harness.stores import Web
from tests.harness.tiny import WordTokenizer, mixed_config, tiny_config

INPUTS: Any = SimpleNamespace(attention="varlen", refused={})


class OneOfTwo(World):
    """One of two ranks that exchange equal values."""

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
        ranks = [held_out_of(config, OneOfTwo(rank=rank, size=2)) for rank in range(2)]
        for name in names:
            whole = rows_of(alone[name])
            assert len(whole) == max_packs
            assert sorted(row for rank in ranks for row in rows_of(rank[name])) == sorted(whole)
            assert {len(rank[name]) for rank in ranks} == {-(-max_packs // (2 * config.batch_size))}
            assert all(
                batch.tokens.shape == (config.batch_size, 32) for rank in ranks for batch in rank[name]
            )


def list_as_a_rank(url: str, config: Any) -> list[list[str]]:
    """Return the file names that this rank has of a URL's listing, a local one, and token shards."""
    with join_world(torch.device("cpu"), timeout=60) as world:
        config.validation = None
        config.data.source = {"_component_": "streampack.Mix", "sources": [
            {"name": "far", "weight": 1, "source": {
                "_component_": "streampack.JSONLSource", "manifest": f"{url}/c/all.txt", "retries": 0}},
            {"name": "near", "weight": 1, "source": config.data.source},
            {"name": "shards", "weight": 1, "source": {
                "_component_": "streampack.TokenShardSource", "folder": f"{url}/t", "retries": 0}},
        ]}  # fmt: skip
        data, _ = build_data(read_config(config), tokenizer=WordTokenizer(), vocab_size=16, world=world)
        assert data.mix is not None
        return [[file.name for file in entry.source.listing()] for entry in data.mix.entries]


def test_rank_0_lists_urls_for_all_ranks(tmp_path: Path) -> None:
    names = [f"{i}.jsonl" for i in range(5)]
    files = {f"/c/{name}": b'{"text": "cat"}\n' for name in names}
    tokenize([{"tokens": [1], "labels": [1]}] * 9, out=tmp_path / "t", lanes=2, progress=False)
    tokens = {f"/t/{path.name}": path.read_bytes() for path in (tmp_path / "t").iterdir()}
    with Web({**files, **tokens, "/c/all.txt": "\n".join(names).encode()}) as web:
        found = run_ranks(list_as_a_rank, 3, web.url, tiny_config(tmp_path))
        assert found == [[names, *found[0][1:]]] * 3
        assert len(found[0][1]) == 1
        assert len(found[0][2]) == 2
        asked = Counter(path for path, _ in web.requests)
        assert [asked[path] for path in files] == [1] * 5
        assert asked["/t/index.json"] == 2, "its size, and it"

        del web.files["/c/3.jsonl"]
        with pytest.raises(RankError) as failed:
            run_ranks(list_as_a_rank, 3, web.url, tiny_config(tmp_path))
        assert str(failed.value).count("/c/3.jsonl: HTTP 404, there is no such file; restore them") >= 1


def test_validation_that_holds_out_nothing_or_trains_nothing_is_refused(tmp_path: Path) -> None:
    two, one = mixed_config(tmp_path / "two"), tiny_config(tmp_path / "one")
    for config, of in ((two, " of source 'counting'"), (one, "")):
        config.validation = {"fraction": 1e-9}
        expected = rf"^validation.fraction=1e-09 holds out none of the rows{of}, of which there are too few: .* give a"
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
    config.data.update({"on_bad_record": "skip", "max_bad_records": 1, "quarantine": str(tmp_path / "bad")})
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


def test_the_opening_reports_lanes_and_truncation(tmp_path: Path) -> None:
    masked = [25 if i % 4 else 5 for i in range(40)]
    rows = [{"tokens": [1] * 30, "labels": [-100] * n + [1] * (30 - n)} for n in masked]
    config = read_config(tiny_config(tmp_path, epochs=1, max_steps=None, packs_per_step=2, validation=None))
    data = IterablePackedDataset(rows, max_seq_len=20, overlong="truncate", num_lanes=2)
    loader = PackedDataLoader(data, packs_per_step=2)
    assert opening(config, loader, inputs=INPUTS, world=World()) == {
        "data": "2 lanes for 1 consumer, an epoch is 40 packs",
        "packing": "strategy=exact_fit, max_seq_len=20, balance_window=0, about 0.0% padding expected",
        "attention": "varlen, the first choice of attention=auto on this device",
        "overlong": "100.0% of 40 samples looked at are longer than max_seq_len=20: overlong=truncate loses 33.3% of "
        "the tokens, 62.5% of the trained ones",
        "untrained": "75.0% of 40 samples looked at train nothing (data.untrained)",
    }
    new = {"begun": 0, "step": 0, "steps": 0}
    assert total_steps(config, loader, world=World(), run=new) == (20, 20)
    data = IterablePackedDataset(rows, max_seq_len=20, overlong="truncate", num_lanes=2, balance_window=9)
    loader = PackedDataLoader(data, packs_per_step=2)
    assert "balance_window=9" in opening(config, loader, inputs=INPUTS, world=World())["packing"]


@pytest.mark.parametrize(("epochs", "settings"), [
    (None, {"strategy": "exact_fit"}), (1, {"strategy": "next_fit"}), (None, {"strategy": "next_fit"}),
    (None, {"split_across_pack": True}),
])  # fmt: skip
def test_the_opening_expects_the_padding_that_packs_have(
    tmp_path: Path, epochs: int | None, settings: dict[str, Any]
) -> None:
    lengths = torch.randint(2, 20, (250,), generator=torch.Generator().manual_seed(0)).tolist()
    rows = [{"tokens": [1] * length, "labels": [1] * length} for length in lengths]
    data = IterablePackedDataset(rows, max_seq_len=24, num_lanes=2, epochs=epochs, **settings)
    changes = {"max_steps": None} if epochs else {}
    config = read_config(tiny_config(tmp_path, epochs=epochs, packs_per_step=2, validation=None, **changes))
    loader = PackedDataLoader(data, packs_per_step=2)
    line = opening(config, loader, inputs=INPUTS, world=World())["packing"]
    assert line.startswith(
        "split_across_pack" if "split_across_pack" in settings else f"strategy={settings['strategy']}"
    )
    expected = float(re.search(r"about ([\d.]+)% padding", line)[1])  # type: ignore[index]
    for _ in islice(loader, 200):
        pass
    assert 100 * loader.ledger().padding == pytest.approx(expected, abs=2)
    assert (expected > 5) == (settings.get("strategy") == "next_fit")


def test_the_opening_says_why_attention_was_chosen_and_what_was_dropped_before_a_resume(
    tmp_path: Path,
) -> None:
    rows = [{"tokens": [1] * 30, "labels": [1] * 30}] * 40
    data = IterablePackedDataset(rows, max_seq_len=20, overlong="truncate")
    loader = PackedDataLoader(data)
    config = read_config(tiny_config(tmp_path, validation=None))
    refused: Any = SimpleNamespace(attention="dense", refused={"varlen": "its kernel is not for this dtype"})
    lines = opening(config, loader, inputs=refused, world=World())
    assert lines["attention"] == "dense; varlen will not do: its kernel is not for this dtype"
    assert "so far" not in lines
    assert lines["data"].startswith(
        "1 lane for 1 consumer (few, as the data are small; to go on with more ranks"
    )
    next(iter(loader))
    resumed = PackedDataLoader(data)
    resumed.load_state_dict(loader.state_dict())
    config = read_config(tiny_config(tmp_path, validation=None, attention="dense"))
    lines = opening(config, resumed, inputs=refused, world=World(), done=1)
    assert lines["attention"] == "dense, as the config says"
    assert lines["so far"] == "30 tokens read, 10 dropped (10 truncated)"
