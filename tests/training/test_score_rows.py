"""`streampack score`: the rows of a config with their log-likelihoods, killed, on ranks, as the reference of DPO."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from streampack_recipes.dpo import train
from torchtune.models.llama3 import llama3

from streampack import cli
from streampack.scoring.journal import Journal
from streampack.training import score_rows as score_rows_module
from streampack.training.score_rows import score_rows
from tests.harness.preferences import PairEncoder, dpo_config
from tests.harness.processes import run_ranks, start_process
from tests.harness.tiny import BASE, WordTokenizer, lora_config, mixed_config, numbers, tiny_config
from tests.harness.tiny_hf import write_base


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
    config = tiny_config(tmp_path, rows=120)
    out = tmp_path / "scores.jsonl"
    text = score_rows(config, out=out)
    rows = lines(tmp_path / "rows.jsonl")
    model, found = tiny_model(tmp_path), lines(out)
    assert [row["text"] for row in found] == [row["text"] for row in rows]
    total = tokens = 0
    for row in found:
        logp, count, greedy = alone(model, WordTokenizer().encode(row["text"]))
        assert row["logp"] == pytest.approx(logp, rel=1e-5)
        assert (row["num_tokens"], row["greedy"]) == (count, greedy)
        total, tokens = total + logp, tokens + count
    assert f"120 rows; {tokens:,} scored tokens, {total / tokens:.4f} nats a token" in text


def test_totals_leave_columns_of_the_rows_alone(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, rows=4)
    path, own = tmp_path / "rows.jsonl", [[-100.0], "text", None, -7]
    rows = [{**row, "logps": value} for row, value in zip(lines(path), own, strict=True)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    out = tmp_path / "scores.jsonl"
    text = score_rows(config, out=out)
    found = lines(out)
    assert [row["logps"] for row in found] == own
    tokens = sum(row["num_tokens"] for row in found)
    assert f"{sum(row['logp'] for row in found) / tokens:.4f} nats a token" in text


def test_rows_that_train_nothing_are_said(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, rows=4)
    row = {"tokens": [3, 4], "labels": [-100, -100]}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    config.data.encoder = None
    assert "1 rows, and nothing of them was scored" in score_rows(config, out=tmp_path / "scores.jsonl")


def test_columns_that_are_asked_for(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, rows=20)
    out = tmp_path / "scores.parquet"
    score_rows(config, out=out, per_token=True, with_rows=False, prefix="small_")
    table = pq.read_table(out)
    assert table.column_names == ["small_logp", "small_num_tokens", "small_greedy", "small_token_logps"]
    for row in table.to_pylist():
        assert len(row["small_token_logps"]) == row["small_num_tokens"]
        assert sum(row["small_token_logps"]) == pytest.approx(row["small_logp"])


def test_adapters_begin_as_the_base(tmp_path: Path) -> None:
    config = lora_config(tmp_path, rows=20)
    score_rows(config, out=tmp_path / "scores.jsonl")
    model = tiny_model(tmp_path, **BASE)
    for row in lines(tmp_path / "scores.jsonl"):
        assert row["logp"] == pytest.approx(alone(model, WordTokenizer().encode(row["text"]))[0], rel=1e-5)


def test_a_hugging_face_model_needs_no_recipe(tmp_path: Path) -> None:
    import transformers

    base = write_base(tmp_path / "base")
    config = tiny_config(tmp_path, rows=30)
    config = {"data": config.data, "tokenizer": config.tokenizer, "device": "cpu"}
    score_rows(config, out=tmp_path / "scores.jsonl", model=str(base))
    model = transformers.AutoModelForCausalLM.from_pretrained(base).eval()
    for row in lines(tmp_path / "scores.jsonl"):
        expected = alone(model, WordTokenizer().encode(row["text"]))
        assert row["logp"] == pytest.approx(expected[0], rel=1e-5)
        assert row["greedy"] == expected[2]


def test_the_numbers_are_the_reference_of_dpo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"max_steps": 6, "validation": None, "data.shuffle": False, "data.num_lanes": 1}
    plain = dpo_config(tmp_path, rows=150, **settings)
    out = tmp_path / "scored.jsonl"
    score_rows(plain, out=out)
    row = lines(out)[7]
    pair = PairEncoder()(row)
    model = tiny_model(tmp_path)
    expected = [alone(model, answer.tokens.tolist(), pair.lengths[0])[0] for answer in pair.answers()]
    assert row["logps"] == pytest.approx(expected, rel=1e-5)

    train(plain)
    encoder = {"_component_": "tests.harness.preferences.PairEncoder", "ref": "logps"}
    known = dpo_config(tmp_path / "known", reference="data", **settings, **{"data.encoder": encoder})
    known.data.source.paths = str(out)
    monkeypatch.setattr("streampack.training.preferences.Reference.__call__", None)  # no forward pass of it
    train(known)
    assert numbers(tmp_path / "known") == pytest.approx(numbers(tmp_path), rel=1e-5)


def on_a_rank(folder: Path) -> str:
    torch.set_num_threads(1)
    return score_rows(tiny_config(folder, rows=120), out=folder / "ranks.jsonl")


def test_two_ranks_share_a_sharded_model(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, rows=120)
    score_rows(config, out=tmp_path / "one.jsonl")
    texts = run_ranks(on_a_rank, 2, tmp_path)
    assert "120 rows" in texts[0]
    assert texts[1] == ""
    one, two = lines(tmp_path / "one.jsonl"), lines(tmp_path / "ranks.jsonl")
    assert [row["text"] for row in one] == [row["text"] for row in two]
    assert [row["logp"] for row in two] == pytest.approx([row["logp"] for row in one], rel=1e-5)


def test_ranks_wait_for_each_other_as_long_while_scoring_as_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = []
    for name, wrapped in (("join_world", score_rows_module.join_world), ("score", score_rows_module.score)):

        def noted(*args: Any, timeout: float, wrapped: Any = wrapped, **settings: Any) -> Any:
            limits.append(timeout)
            return wrapped(*args, timeout=timeout, **settings)

        monkeypatch.setattr(score_rows_module, name, noted)
    config = tiny_config(tmp_path, rows=2)
    config.pop("collective_timeout", None)
    score_rows(config, out=tmp_path / "scores.jsonl")
    assert limits == [600, 600]


def slowly(folder: Path) -> None:
    """Score, a row in a hundredth of a second, so that a kill comes in the middle."""
    write = Journal.write

    def written(self: Any, row: Any) -> None:
        write(self, row)
        self.flush()
        time.sleep(0.01)

    Journal.write = written  # type: ignore[method-assign]
    score_rows(tiny_config(folder, rows=400), out=folder / "scores.jsonl")


def test_a_killed_job_goes_on_and_writes_every_row_once(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, rows=400)
    journal = tmp_path / "scores.jsonl.unfinished" / "rows.jsonl"
    kept = []
    for more in (40, 90):
        process = start_process(slowly, tmp_path)
        deadline = time.monotonic() + 60
        goal = sum(kept) + more
        while not journal.exists() or journal.read_bytes().count(b"\n") < goal:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        os.kill(process.pid or 0, signal.SIGKILL)
        process.join()
        kept.append(journal.read_bytes().count(b"\n") - sum(kept))
    assert 0 < sum(kept) < 400
    text = score_rows(config, out=tmp_path / "scores.jsonl")
    assert f"400 rows, {sum(kept)} of them by an earlier job" in text
    score_rows(config, out=tmp_path / "whole.jsonl")
    again, whole = lines(tmp_path / "scores.jsonl"), lines(tmp_path / "whole.jsonl")
    assert [row["text"] for row in again] == [row["text"] for row in whole]
    assert [row["logp"] for row in again] == pytest.approx([row["logp"] for row in whole], rel=1e-5)


def test_what_is_refused(tmp_path: Path) -> None:
    out = tmp_path / "scores.jsonl"
    config = tiny_config(tmp_path, rows=30, **{"data.max_seq_len": 12, "data.buffer_size": 4})
    with pytest.raises(
        ValueError, match=r"rows.jsonl:\d+: has \d+ tokens before its last one, and max_seq_len=12"
    ):
        score_rows(config, out=out)
    with pytest.raises(
        ValueError, match="overlong=error, and this has overlong=windows to 12 tokens; go on with"
    ):
        score_rows(config, out=out, overlong="windows")
    score_rows(config, out=tmp_path / "windows.jsonl", overlong="windows")
    assert sum(row["num_tokens"] > 12 for row in lines(tmp_path / "windows.jsonl"))
    config.data.source.paths = str(tmp_path / "windows.jsonl")
    with pytest.raises(ValueError, match="have a column 'greedy', which would be overwritten; add --prefix"):
        score_rows(config, out=tmp_path / "again.jsonl", overlong="truncate")
    with pytest.raises(ValueError, match="a mixture, whose rows have no order of their own"):
        score_rows(mixed_config(tmp_path), out=tmp_path / "mixed.jsonl")


def test_bad_rows_can_be_skipped(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, rows=6)
    path = tmp_path / "rows.jsonl"
    good = path.read_text().splitlines()
    path.write_text("\n".join([good[0], "{broken", '{"words": "red"}', *good[1:]]) + "\n")
    with pytest.raises(ValueError, match="rows.jsonl:2"):
        score_rows(config, out=tmp_path / "scores.jsonl")
    config.data.on_bad_record = "skip"
    score_rows(config, out=tmp_path / "skipped.jsonl")
    found = lines(tmp_path / "skipped.jsonl")
    assert [number for number, row in enumerate(found) if "error" in row] == [1, 2]
    assert "column 'text' is missing" in found[2]["error"]
    assert [row["text"] for row in found if "text" in row] == [json.loads(line)["text"] for line in good]


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from omegaconf import OmegaConf

    path, out = tmp_path / "mine.yaml", tmp_path / "scores.jsonl"
    OmegaConf.save(tiny_config(tmp_path, rows=10), path)
    words = ["score", "--config", str(path), "--trust", "tests", "--out", str(out)]
    assert cli.main(words) == 0
    assert capsys.readouterr().out.startswith(f"{out}: 10 rows; ")
    assert cli.main(words) == 1
    assert capsys.readouterr().err == f"{path}: {out} exists; name another file, or remove it\n"
    assert cli.main([*words[:-1], str(tmp_path / "other.jsonl"), "--overlong", "cut"]) == 1
    assert "overlong='cut' is unknown" in capsys.readouterr().err
