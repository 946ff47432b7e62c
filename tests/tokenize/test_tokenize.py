"""Token shards: the same bytes with any number of workers, and after any kill."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from streampack import (
    IterablePackedDataset,
    JSONLSource,
    MapSource,
    Mix,
    ShapeEncoder,
    TextEncoder,
    TokenShardSource,
    cli,
)
from streampack.sources import Holdout, Reading
from streampack.tokenize import tokenize
from streampack.types import Sample
from tests.harness.hf_tokenizers import byte_level
from tests.harness.tokenizing import Dies, Killed, Letters, content, corpus, run, wait_for

ROOT = Path(__file__).resolve().parents[2]


def test_the_number_of_workers_changes_no_byte(tmp_path: Path) -> None:
    source = corpus(tmp_path / "corpus")
    one, three = run(source, tmp_path / "one"), run(source, tmp_path / "three", workers=3)
    assert content(one) == content(three)
    assert len(content(one)) > 10
    encode = TextEncoder(Letters())
    expected = sorted(encode(row.data).tokens.tolist() for row in source.read(Reading()))
    shards = TokenShardSource(one)
    assert sorted(row.data["tokens"].tolist() for row in shards.read(Reading())) == expected
    assert {shard.dtype for shard in shards.shards} == {"uint16"}
    index = json.loads((one / "index.json").read_text())
    assert index["plan"]["encoder"]["samples"]


def test_without_tqdm_there_is_no_bar(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = corpus(tmp_path / "corpus")
    shown = content(run(source, tmp_path / "shown", progress=True))
    monkeypatch.setitem(sys.modules, "tqdm", None)  # as if it were not installed
    assert content(run(source, tmp_path / "out", progress=True)) == shown


SCRIPT = """
import sys
from pathlib import Path
from tests.harness.tokenizing import Logged, corpus, run
folder = Path(sys.argv[1])
run(corpus(folder / "corpus"), folder / "out", encoder=Logged(folder / "log", seconds=0.01), workers=2)
"""


def encoded(folder: Path) -> int:
    log = folder / "log"
    return len(log.read_text().splitlines()) if log.exists() else 0


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="the system does not list its processes")
def test_a_killed_call_is_resumed(tmp_path: Path) -> None:
    """The main process is killed; its workers end by themselves."""
    whole = content(run(corpus(tmp_path / "corpus"), tmp_path / "whole"))
    with subprocess.Popen([sys.executable, "-c", SCRIPT, str(tmp_path)], cwd=ROOT) as process:
        try:
            wait_for(lambda: encoded(tmp_path) > 60)
        finally:
            process.kill()
    wait_for(lambda: not any(map(alive, set((tmp_path / "log").read_text().split()))), seconds=10)
    assert not (tmp_path / "out" / "index.json").exists()
    for path in (tmp_path / "out").glob("tokens-*"):
        assert path.read_bytes() == whole[path.name]
    assert list((tmp_path / "out").glob(".tokens-*")), "the workers left what they had begun"
    run(corpus(tmp_path / "corpus"), tmp_path / "out")
    assert content(tmp_path / "out") == whole
    assert not list((tmp_path / "out").glob(".*"))


def alive(pid: str) -> bool:
    """Return whether a process exists and is no zombie."""
    try:
        state = Path("/proc", pid, "stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


class Suicide(TextEncoder):
    def __call__(self, row: Mapping[str, Any], /) -> Sample:
        if "1:77 " in row["text"]:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__call__(row)


def test_a_killed_worker_is_an_error(tmp_path: Path) -> None:
    source = corpus(tmp_path / "corpus")
    with pytest.raises(
        RuntimeError, match="a worker process was killed, perhaps for want of memory; the same call"
    ):
        run(source, tmp_path / "out", encoder=Suicide(Letters()), workers=2)
    run(source, tmp_path / "out")
    assert content(tmp_path / "out") == content(run(source, tmp_path / "whole"))


@pytest.mark.parametrize(
    ("line", "message", "workers"),
    [
        ('{"text": 5}', "1.jsonl:42: column 'text' holds a int; mend the row", 2),
        ('{"text": "a', "1.jsonl:42: not a line of JSON", 1),
    ],
)
def test_errors_name_file_and_row(tmp_path: Path, line: str, message: str, workers: int) -> None:
    corpus(tmp_path / "corpus")
    path = tmp_path / "corpus" / "1.jsonl"
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines[:41], line, *lines[42:]]))
    source = JSONLSource(str(tmp_path / "corpus" / "*.jsonl"))
    with pytest.raises(ValueError, match=message):
        run(source, tmp_path / "out", workers=workers)
    assert "index.json" not in content(tmp_path / "out")
    path.write_text("\n".join(lines))
    source = JSONLSource(str(tmp_path / "corpus" / "*.jsonl"))
    before = content(tmp_path / "out")
    with pytest.raises(
        ValueError, match="bin was made with corpus='.*; give another folder, or remove the old"
    ):
        run(source, tmp_path / "out")
    assert content(tmp_path / "out") == before


BROKEN = {
    3: '{"text": "a',
    4: "[1]",
    5: '{"text": 5}',
    40: '{"words": "a"}',
    99: '{"text": 7}',
    149: '{"text": ',  # the last of its file
}


def broken_corpus(folder: Path) -> JSONLSource:
    corpus(folder)
    for part in range(2):
        path = folder / f"{part}.jsonl"
        lines = path.read_text().splitlines()
        path.write_text("\n".join(BROKEN.get(i, line) for i, line in enumerate(lines)) + "\n")
    return JSONLSource(str(folder / "*.jsonl"))


def listed(folder: Path) -> list[tuple[str, int, str]]:
    """Return the records that a quarantine lists."""
    lines = [line for path in sorted(folder.iterdir()) for line in path.read_text().splitlines()]
    return sorted((entry["path"], entry["offset"], entry["reason"]) for entry in map(json.loads, lines))


SKIP = {"skip_bad": True}


def test_broken_records_are_skipped_as_by_a_dataset(tmp_path: Path) -> None:
    source, encode = broken_corpus(tmp_path / "corpus"), TextEncoder(Letters())
    out = run(source, tmp_path / "out", skip_bad=tmp_path / "bad")
    three = run(source, tmp_path / "three", skip_bad=tmp_path / "bad3", workers=3)
    assert content(three) == content(out)
    assert json.loads((out / "index.json").read_text())["bad_records"] == 2 * len(BROKEN)
    settings: Any = {"encoder": encode, "max_seq_len": 256, "num_lanes": 5}
    packed = IterablePackedDataset(source, **settings, skip_bad=tmp_path / "of the dataset")
    packs = list(packed.stream())
    assert packs[0].tokens.size
    assert listed(tmp_path / "bad") == listed(tmp_path / "bad3") == listed(tmp_path / "of the dataset")
    assert len(listed(tmp_path / "bad")) == 2 * len(BROKEN)
    got = sorted(row.data["tokens"].tolist() for row in TokenShardSource(out).read(Reading()))

    rows = [json.loads(line) for line in whole_lines(tmp_path / "corpus")]
    assert len(rows) == 300 - 2 * len(BROKEN)
    assert got == sorted(encode(row).tokens.tolist() for row in rows)


def whole_lines(folder: Path) -> list[str]:
    lines = [line for part in range(2) for line in (folder / f"{part}.jsonl").read_text().splitlines()]
    return [line for line in lines if line not in BROKEN.values()]


@pytest.mark.parametrize("after", [20, 250])
def test_skipped_records_are_counted_across_a_resume(tmp_path: Path, after: int) -> None:
    source, bad = broken_corpus(tmp_path / "corpus"), tmp_path / "bad"
    whole = content(run(source, tmp_path / "whole", **SKIP))
    with pytest.raises(Killed):
        run(source, tmp_path / "out", encoder=Dies(after), skip_bad=bad)
    run(source, tmp_path / "out", skip_bad=bad, workers=2)
    assert content(tmp_path / "out") == whole, "the counts in the headers, too"
    assert len(listed(bad)) == 2 * len(BROKEN)


def test_too_many_broken_records_are_an_error(tmp_path: Path) -> None:
    """They are counted by lane, over several calls."""
    source, many = broken_corpus(tmp_path / "corpus"), 2 * len(BROKEN)
    settings = {"lanes": 1, "shard_tokens": 300}
    whole = content(run(source, tmp_path / "enough", **settings, skip_bad=many))
    limit = rf"1.jsonl:150: .*; lane 0 has skipped {many - 1} others, and"
    for _ in range(2):  # the second call begins after the shards of the first
        with pytest.raises(ValueError, match=limit):
            run(source, tmp_path / "out", **settings, skip_bad=many - 1)
    assert len(content(tmp_path / "out")) > 10
    run(source, tmp_path / "out", **settings, skip_bad=0.04)
    assert content(tmp_path / "out") == whole


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "list": ({"skip_bad": "s3://bad"}, "skip_bad.folder='s3://bad' is a URL"),
    # The record is sound, so it is not skipped.
    "label": (SKIP, "sample 0: a label is neither its token nor -100, and a shard keeps no other"),
    "id": ({"rows": [[1, 70_000]], "dtype": "uint16"}, "sample 0: token id 70000 does not fit into uint16"),
    "dtype": ({"dtype": "int8"}, "dtype='int8'"),
    "engine": ({"engine": "spark"}, "engine='spark' is unknown; choose one of 'processes', 'ray'"),
    "workers": ({"engine": "ray", "workers": 2}, "workers=2 are processes of this machine"),
    "address": ({"address": "auto"}, "address='auto' is that of a Ray cluster"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_a_shard_cannot_hold_and_settings_are_refused(tmp_path: Path, case: str) -> None:
    settings, message = REFUSED[case]
    tokens = settings.get("rows")
    rows = (
        [{"tokens": ids, "labels": ids} for ids in tokens]
        if tokens
        else [{"tokens": [1, 2], "labels": [1, 3]}]
    )
    with pytest.raises(ValueError, match=message):
        tokenize(rows, out=tmp_path, progress=False, **{k: v for k, v in settings.items() if k != "rows"})
    assert not list(tmp_path.glob("tokens-*"))


def test_sources_of_no_rows_of_their_own_are_refused(tmp_path: Path) -> None:
    rows = [{"tokens": [1], "labels": [1]}]
    mix = Mix([{"name": "a", "source": rows, "weight": 1}])
    with pytest.raises(
        ValueError, match="a mixture is weighted while it is read; tokenize each of its sources"
    ):
        tokenize(mix, out=tmp_path, progress=False)
    parts = [Holdout(MapSource(rows), fraction=0.5, part=part) for part in ("train", "validation")]
    [nothing] = [part for part in parts if not list(part.read(Reading()))]
    with pytest.raises(ValueError, match="the source has no rows; there is nothing to write"):
        tokenize(nothing, out=tmp_path, progress=False)


CONFIG = """
data:
  source: {{_component_: streampack.JSONLSource, paths: {path}}}
  encoder: {{_component_: streampack.TokensEncoder, labels: null}}
  max_seq_len: 512
"""


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "rows.jsonl").write_text('{"tokens": [1, 2]}\n{"tokens": [3]}\n{"ids": [3]}\n')
    config = tmp_path / "data.yaml"
    config.write_text(CONFIG.format(path=tmp_path / "rows.jsonl"))
    words = ["tokenize", "--config", str(config), "--out", str(tmp_path / "out"), "--workers", "2"]
    assert cli.main(words) == 1
    assert "rows.jsonl:3: column 'tokens' is missing" in capsys.readouterr().err.splitlines()[-1]
    assert cli.main([*words, "data.encoder.tokens=ids", "--lanes", "1"]) == 1
    assert "rows.jsonl:1: column 'ids' is missing" in capsys.readouterr().err
    (tmp_path / "rows.jsonl").write_text('{"tokens": [1, 2]}\n{"tokens": [3]}\n')
    assert cli.main(words) == 0
    assert TokenShardSource(tmp_path / "out").tokens == 3
    assert cli.main([*words, "--dtype", "uint16"]) == 1
    assert "was made with dtype='uint32' and this is dtype='uint16'" in capsys.readouterr().err
    (tmp_path / "rows.jsonl").write_text('{"tokens": [1, 2]}\n{"tokens": [3]}\n{"ids": [3]}\n')
    words = [*words[:4], str(tmp_path / "skipped"), f"data.skip_bad.folder={tmp_path / 'bad'}"]
    assert cli.main(words) == 0
    assert TokenShardSource(tmp_path / "skipped").tokens == 3
    assert len(listed(tmp_path / "bad")) == 1


@pytest.mark.parametrize("name", ["tokens-", "index.json"])
def test_a_full_disk_is_said_in_a_sentence_and_leaves_no_part_of_a_file(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def opened(path: Path, mode: str = "r", *args: Any, **settings: Any) -> Any:
        if full := name in path.name and mode == "wb":
            path.touch()
        return plain(Path("/dev/full") if full else path, mode, *args, **settings)

    plain, out, config = Path.open, tmp_path / "out", tmp_path / "data.yaml"
    (tmp_path / "rows.jsonl").write_text('{"tokens": [1, 2]}\n{"tokens": [3]}\n')
    config.write_text(CONFIG.format(path=tmp_path / "rows.jsonl"))
    words = ["tokenize", "--config", str(config), "--out", str(out)]
    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", opened)
        assert cli.main(words) == 1
    assert capsys.readouterr().err.splitlines()[-1] == "streampack: error: [Errno 28] No space left on device"
    files = [path.relative_to(out) for path in out.rglob("*") if path.is_file()]
    assert not [path for path in files if path.name.startswith(".")]
    assert cli.main(words) == 0
    assert TokenShardSource(out).tokens == 3


def test_the_encoder_of_the_command_follows_from_the_rows(tmp_path: Path) -> None:
    tokenizer = byte_level()
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    row = {"q": "Hi", "a": "Hello"}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    (tmp_path / "data.yaml").write_text(
        f"tokenizer: {{_component_: streampack.HFTokenizer, path: {tmp_path / 'tokenizer'}}}\n"
        f"data: {{source: {{_component_: streampack.JSONLSource, paths: {tmp_path / 'rows.jsonl'}}}, "
        "columns: {q: instruction, a: output}}\n"
    )
    assert (
        cli.main(["tokenize", "--config", str(tmp_path / "data.yaml"), "--out", str(tmp_path / "out")]) == 0
    )
    [stored] = [row.data for row in TokenShardSource(tmp_path / "out").read(Reading())]
    sample = ShapeEncoder(tokenizer, shape="alpaca")({"instruction": "Hi", "output": "Hello"})
    assert (list(stored["tokens"]), list(stored["labels"])) == (
        sample.tokens.tolist(),
        sample.labels.tolist(),
    )
