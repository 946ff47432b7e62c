"""`streampack score`: the rows of a config with their log-likelihoods, on ranks, as the reference of DPO."""

from __future__ import annotations

import contextlib
import io
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from streampack_recipes.dpo import train
from torchtune.models.llama3 import llama3

from streampack import cli
from streampack.training.preferences import Reference
from tests.harness.preferences import PairEncoder, dpo_config
from tests.harness.processes import run_ranks
from tests.harness.tiny import WordTokenizer, mixed_config, numbers, tiny_config
from tests.harness.tiny_hf import write_base


def score(config: Any, out: Path, *words: str) -> str:
    """Run the command and return what it says.

    Raises:
        ValueError: with its error.
    """
    path = out.with_name(f"{out.stem}.{os.environ.get('RANK', '')}.yaml")
    OmegaConf.save(config, path)
    said, refused = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(refused):
        status = cli.main(["score", "--config", str(path), "--out", str(out), *words])
    if status:
        raise ValueError(refused.getvalue())
    return said.getvalue()


def lines(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in out.read_text().splitlines()]


def tiny_model(folder: Path, **sizes: Any) -> Any:
    sizes = sizes or {
        "vocab_size": 16, "num_layers": 1, "num_heads": 2, "num_kv_heads": 1, "embed_dim": 16,
        "max_seq_len": 32, "intermediate_dim": 32,
    }  # fmt: skip
    model = llama3(**sizes).eval()
    model.load_state_dict(torch.load(folder / "init" / "model.bin", weights_only=True))
    return model


@torch.no_grad()
def alone(model: Any, tokens: list[int], begin: int = 1) -> tuple[float, int, bool]:
    """Score tokens from ``begin`` on by a forward pass of their own."""
    output = model(torch.tensor([tokens]))
    logps = getattr(output, "logits", output)[0].double().log_softmax(-1)[begin - 1 : -1]
    wanted = torch.tensor(tokens[begin:])
    greedy = bool((logps.argmax(1) == wanted).all())
    return float(logps.gather(1, wanted[:, None]).sum()), len(wanted), greedy


def test_rows_with_their_scores(tmp_path: Path) -> None:
    """Columns of the rows are left alone, and totals are not made of them."""
    config = tiny_config(tmp_path, rows=40)
    path = tmp_path / "rows.jsonl"
    rows = [
        {**row, "logps": value}
        for row, value in zip(lines(path), [[-100.0], "text", None, -7] * 10, strict=True)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    out = tmp_path / "scores.jsonl"
    text = score(config, out)
    model, found = tiny_model(tmp_path), lines(out)
    assert [(row["text"], row["logps"]) for row in found] == [(row["text"], row["logps"]) for row in rows]
    total = tokens = 0
    for row in found:
        logp, count, greedy = alone(model, WordTokenizer().encode(row["text"]))
        assert row["logp"] == pytest.approx(logp, rel=1e-5)
        assert (row["num_tokens"], row["greedy"]) == (count, greedy)
        total, tokens = total + logp, tokens + count
    assert f"40 rows; {tokens:,} scored tokens, {total / tokens:.4f} nats a token" in text

    bare = tmp_path / "bare.jsonl"
    score(config, bare, "--per-token", "--without-rows")
    for row, expected in zip(lines(bare), found, strict=True):
        assert list(row) == ["logp", "num_tokens", "greedy", "token_logps"]
        assert len(row["token_logps"]) == row["num_tokens"]
        assert sum(row["token_logps"]) == pytest.approx(row["logp"])
        assert row["logp"] == pytest.approx(expected["logp"], rel=1e-5)


def test_a_hugging_face_model_needs_no_recipe(tmp_path: Path) -> None:
    import transformers

    base = write_base(tmp_path / "base")
    config = tiny_config(tmp_path, rows=30)
    config = {"data": config.data, "tokenizer": config.tokenizer, "device": "cpu"}
    score(config, tmp_path / "scores.jsonl", "--model", str(base))
    model = transformers.AutoModelForCausalLM.from_pretrained(base).eval()
    for row in lines(tmp_path / "scores.jsonl"):
        expected = alone(model, WordTokenizer().encode(row["text"]))
        assert row["logp"] == pytest.approx(expected[0], rel=1e-5)
        assert row["greedy"] == expected[2]


def test_the_numbers_are_the_reference_of_dpo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"max_steps": 6, "validation": None, "data.shuffle": False, "data.num_lanes": 1}
    plain = dpo_config(tmp_path, rows=150, **settings)
    out = tmp_path / "scored.jsonl"
    score(plain, out)
    row = lines(out)[7]
    pair = PairEncoder()(row)
    model = tiny_model(tmp_path)
    expected = [alone(model, answer.tokens.tolist(), pair.lengths[0])[0] for answer in pair.answers()]
    assert row["logps"] == pytest.approx(expected, rel=1e-5)

    train(plain)
    encoder = {"_component_": "tests.harness.preferences.PairEncoder", "ref": "logps"}
    known = dpo_config(tmp_path / "known", reference="data", **settings, **{"data.encoder": encoder})
    known.data.source.paths = str(out)
    with monkeypatch.context() as patched:
        patched.setattr(Reference, "__call__", None)  # no forward pass of it
        train(known)
    assert numbers(tmp_path / "known") == pytest.approx(numbers(tmp_path), rel=1e-5)
    with pytest.raises(
        ValueError, match="the data have ref_logps, and reference=model would compute them again"
    ):
        train(OmegaConf.merge(known, {"reference": "model", "output_dir": str(tmp_path / "third")}))


def on_a_rank(folder: Path) -> str:
    torch.set_num_threads(1)
    return score(tiny_config(folder, rows=120), folder / "ranks.jsonl")


def test_two_ranks_share_a_sharded_model(tmp_path: Path) -> None:
    score(tiny_config(tmp_path, rows=120), tmp_path / "one.jsonl")
    texts = run_ranks(on_a_rank, 2, tmp_path)
    assert "120 rows" in texts[0]
    one, two = lines(tmp_path / "one.jsonl"), lines(tmp_path / "ranks.jsonl")
    assert [row["text"] for row in one] == [row["text"] for row in two]
    assert [row["logp"] for row in two] == pytest.approx([row["logp"] for row in one], rel=1e-5)


def test_what_is_refused(tmp_path: Path) -> None:
    out = tmp_path / "scores.jsonl"
    config = tiny_config(tmp_path, rows=30, **{"data.max_seq_len": 12, "data.buffer_size": 4})
    with pytest.raises(
        ValueError, match=r"rows.jsonl:\d+: has \d+ tokens before its last one, and max_seq_len=12"
    ):
        score(config, out)
    windows = tmp_path / "windows.jsonl"
    score(config, windows, "--overlong", "windows")
    assert sum(row["num_tokens"] > 12 for row in lines(windows))
    config.data.source.paths = str(windows)
    with pytest.raises(ValueError, match="have a column 'greedy', which would be overwritten; rename it"):
        score(config, tmp_path / "again.jsonl", "--overlong", "truncate")
    with pytest.raises(ValueError, match="a mixture, whose rows have no order of their own"):
        score(mixed_config(tmp_path), tmp_path / "mixed.jsonl")


def test_bad_rows_can_be_skipped(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, rows=6)
    path = tmp_path / "rows.jsonl"
    good = path.read_text().splitlines()
    path.write_text("\n".join([good[0], "{broken", '{"words": "red"}', *good[1:]]) + "\n")
    with pytest.raises(ValueError, match="rows.jsonl:2"):
        score(config, tmp_path / "scores.jsonl")
    config.data.skip_bad = True
    score(config, tmp_path / "skipped.jsonl")
    found = lines(tmp_path / "skipped.jsonl")
    assert [number for number, row in enumerate(found) if "error" in row] == [1, 2]
    assert "column 'text' is missing" in found[2]["error"]
    assert [row["text"] for row in found if "text" in row] == [json.loads(line)["text"] for line in good]
