"""README and docs: blocks run as printed, links lead somewhere, and what is made from the code is up to date."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import streampack
from benchmarks.lengths import DISTRIBUTIONS, lengths, lower_bound
from docs.drawings import FOLDER, PICTURES
from docs.tables import DOCS, documented, put, tables
from streampack import IterablePackedDataset
from streampack.training.config import RunConfig
from tests.harness.hf_tokenizers import byte_level
from tests.harness.models_table import BACKENDS, PAGE, read_page
from tests.harness.processes import run_ranks

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
OWN_TESTS = {"after_training.md", "models.md"}  # they need more than is printed
AGAIN = "`make docs` writes it anew"


def blocks(page: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


WITH_BLOCKS = [page for page in PAGES if blocks(page) and page.name not in OWN_TESTS]


def test_readme_counts_the_families_of_the_page_of_models() -> None:
    pytest.importorskip("transformers")
    from tests.harness.hybrid_models import HYBRIDS

    taken: dict[str, set[str]] = {"of torchtune": set(), "of transformers": set()}
    for (library, family, backend), outcome in read_page(PAGE.read_text(encoding="utf-8")).items():
        if backend in BACKENDS and not outcome.startswith("refused"):
            # Behind a comma stands a variant of the family.
            taken[f"of {library}"].add(family.partition(",")[0])
    counts = {what: len(families) for what, families in taken.items()}
    counts |= {"model families": sum(counts.values()), "of them with layers that no mask": len(HYBRIDS)}
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    told = {what: [int(number) for number in re.findall(rf"(\d+) {what}\b", readme)] for what in counts}
    assert told == {what: [count] for what, count in counts.items()}


def rows_of(text: str) -> list[list[str]]:
    """The rows of a page's tables."""
    return [
        [cell.strip(" *") for cell in line.strip("|").split("|")]
        for line in text.splitlines()
        if line[:1] == "|"
    ]


def test_readme_has_the_packs_of_the_run_that_the_comparison_names() -> None:
    comparison = (ROOT / "docs" / "comparison.md").read_text(encoding="utf-8")
    [name] = re.findall(r"benchmarks/results/(density-\S+\.md)", comparison)
    _, *corpora = (ROOT / "benchmarks" / "results" / name).read_text(encoding="utf-8").split("\n## ")[:4]
    assert [each.partition("\n")[0] for each in corpora] == ["flan", "orca", "stack"]
    measured = [{row[0]: row for row in rows_of(each)} for each in corpora]
    readme = (ROOT / "README.md").read_text(encoding="utf-8").partition("## Packing efficiency")[2]
    [packers, eight, *told] = [
        row[:4] for row in rows_of(readme.partition("\n## ")[0]) if "---" not in row[0]
    ]
    assert packers == ["packer", "flan", "orca", "stack"]

    def cells(above: int, padding: float) -> tuple[int, float]:
        return above, round(padding, 2 if padding < 1.5 else 1)

    def read(cell: str) -> tuple[int, float]:
        above, padding = re.fullmatch(r"([\d,]+)\** \(([\d.]+) %\)", cell).groups()  # type: ignore[union-attr]
        return int(above.replace(",", "")), float(padding)

    for label, *row in told:
        packer = "exact_fit" if "exact_fit" in label else label.replace("`", "")
        runs = [each[packer] for each in measured]
        assert [read(cell) for cell in row] == [
            cells(int(run[2].replace(",", "")), float(run[3].rstrip("%"))) for run in runs
        ], label
    assert "num_lanes=1" in told[0][0]
    assert "num_lanes=8" in eight[0]
    for name, cell in zip(DISTRIBUTIONS, eight[1:], strict=True):
        samples = lengths(name)
        rows = [{"input_ids": np.ones(length, np.int32)} for length in samples]
        packs = sum(1 for _ in IterablePackedDataset(rows, max_seq_len=4096).stream())
        found = packs - lower_bound(samples, 4096), 100 * (1 - samples.sum() / (packs * 4096))
        assert read(cell) == cells(*found), "the default is 8 lanes here"


def test_readme_has_the_speeds_of_the_runs_that_it_names() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    [name] = re.findall(r"\((benchmarks/results/inputs-\S+\.md)\)", readme)
    _, *inputs = (ROOT / name).read_text(encoding="utf-8").split("\n## ")
    of_files = [rows_of(each) for each in inputs if each.partition("\n")[0].endswith(("Parquet", "datasets"))]
    assert len(of_files) == 3
    for packer, words in (
        ("torchtune PackedDataset", "torchtune's\npacker"),
        ("TRL bfd, its collator", "TRL's `bfd` with"),
    ):
        ratios = [float(row[2]) for rows in of_files for row in rows if row[0] == packer]
        assert f"{min(ratios):.1f}x to {max(ratios):.1f}x as fast as {words}" in readme
    comparison = rows_of((ROOT / "docs" / "comparison.md").read_text(encoding="utf-8"))
    [ours] = [row for row in comparison if row[0].startswith("streampack `exact_fit`")]
    [in_memory] = re.findall(r"nothing is read, it is (\S+)x as fast as torchtune's", readme)
    assert in_memory == ours[3]


def test_there_are_pages_with_blocks() -> None:
    assert {"README.md", "data.md", "hugging_face.md", "several_devices.md"} <= {
        page.name for page in WITH_BLOCKS
    }


@pytest.mark.parametrize("page", WITH_BLOCKS, ids=lambda page: page.name)
@pytest.mark.filterwarnings("ignore")  # of transformers and TRL, which a reader sees and may ignore
def test_python_blocks_run_as_printed(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One after the other, in a folder with data/*.jsonl and chats/*.jsonl, a small ``model`` and ``tokenizer``."""
    transformers = pytest.importorskip("transformers")
    if "trl" in page.read_text(encoding="utf-8"):
        pytest.importorskip("trl")
    (tmp_path / "data").mkdir()
    lines = [json.dumps({"text": "one two three " * (i % 7 + 1)}) for i in range(40)]
    (tmp_path / "data" / "rows.jsonl").write_text("\n".join(lines) + "\n")
    (tmp_path / "chats").mkdir()
    turns = [{"role": "user", "content": "what is this"}, {"role": "assistant", "content": "a test"}]
    (tmp_path / "chats" / "rows.jsonl").write_text((json.dumps({"messages": turns}) + "\n") * 40)
    monkeypatch.chdir(tmp_path)
    sizes: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    config = transformers.LlamaConfig(vocab_size=1000, num_attention_heads=2, pad_token_id=0, **sizes)
    names: dict[str, Any] = {
        "__name__": "page",
        "model": transformers.LlamaForCausalLM(config),
        "tokenizer": byte_level(),
    }
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    for number, block in enumerate(blocks(page)):
        exec(compile(block, f"{page.name}, block {number}", "exec"), names)


LINKED = [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "benchmarks" / "README.md"]


def prose(page: Path) -> str:
    """The text of a page without its blocks of code."""
    return re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as code hosts and MyST make them."""
    headings = re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", LINKED, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        if "://" not in link and not (target.exists() and (not anchor or anchor in anchors(target))):
            broken.append(link)
    assert not broken


def listed(page: Path) -> set[Path]:
    """The pages in the toctrees of a page; an entry may be a glob."""
    text = page.read_text(encoding="utf-8")
    trees = re.findall(r"^```\{toctree\}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    entries = [line for tree in trees for line in tree.splitlines() if line and not line.startswith(":")]
    for entry in entries:
        assert "*" in entry or (page.parent / f"{entry}.md").is_file(), f"{page.name} lists {entry}"
    return {path.resolve() for entry in entries for path in page.parent.glob(f"{entry}.md")}


def test_every_page_is_in_a_table_of_contents() -> None:
    index = ROOT / "docs" / "index.md"
    found = {index} | listed(index)
    found |= {below for page in found for below in listed(page)}
    results = set((ROOT / "benchmarks" / "results").glob("*.md"))
    assert {*LINKED, *results} - found == set()


def whole_configs(page: Path) -> list[str]:
    """The YAML blocks of a page that are in streampack's own keys, not in torchtune's."""
    text = page.read_text(encoding="utf-8")
    found: list[str] = re.findall(r"^```yaml\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    return [block for block in found if not block.startswith("# torchtune") and re.search(r"^\w", block)]


@pytest.mark.parametrize("page", [page for page in PAGES if whole_configs(page)], ids=lambda page: page.name)
def test_yaml_blocks_have_keys_that_a_run_knows(page: Path) -> None:
    """Put into the quickstart's config; what a run would read is not opened."""
    pytest.importorskip("torchtune")
    from omegaconf import OmegaConf

    from streampack.training.checks import read_config, to_plain

    encoder = "{_component_: streampack.TextEncoder}"  # where a page shows three dots
    for block in whole_configs(page):
        config = to_plain(OmegaConf.load(ROOT / "configs" / "quickstart.yaml"))
        written = OmegaConf.to_container(OmegaConf.create(block.replace("{...}", encoder)))
        assert isinstance(written, dict)
        config |= {**written, "data": {**config["data"], "max_seq_len": 512, **written.get("data", {})}}
        if "dataset" in written:  # of torchtune's, in place of ours
            del config["data"], config["validation"]
        config["model"].pop("max_seq_len", None)  # the quickstart's model is small
        read_config(config)


def weights_after(block: str) -> list[list[float]]:
    """Train a small model by a block of a page, on a rank of a group or alone."""
    import transformers

    sizes: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    config = transformers.LlamaConfig(vocab_size=100, num_attention_heads=2, pad_token_id=0, **sizes)
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config)
    names: dict[str, Any] = {"__name__": "page", "model": model}
    exec(block, names)
    return [weight.flatten().tolist() for weight in model.state_dict().values()]


def test_plain_ddp_gives_the_same_weights_on_any_number_of_ranks(tmp_path: Path) -> None:
    """The block of "In a loop of your own"."""
    pytest.importorskip("transformers")
    page = ROOT / "docs" / "guides" / "several_devices.md"
    [block] = blocks(page)
    [alone] = run_ranks(weights_after, 1, block)
    for weights in run_ranks(weights_after, 2, block):
        assert weights != []
        for ours, theirs in zip(weights, alone, strict=True):
            assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-6)


# What is made from the code.


@pytest.mark.parametrize("place", tables(), ids=" ".join)
def test_a_table_is_what_the_code_says(place: tuple[str, str]) -> None:
    page, name = place
    text = (DOCS / page).read_text(encoding="utf-8")
    assert put(text, name, tables()[place]) == text, AGAIN


@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_is_what_the_code_draws(name: str) -> None:
    assert (FOLDER / name).read_text(encoding="utf-8") == PICTURES[name](), AGAIN


def test_every_key_of_a_run_and_every_public_name_is_described() -> None:
    keys = [each.name for each in fields(RunConfig)]
    assert list(documented(RunConfig.__doc__ or "", "Attributes")) == keys
    text = (DOCS / "reference" / "api.md").read_text(encoding="utf-8")
    found = re.findall(r"^\.\. auto\w+:: streampack\.(\w+)$", text, re.MULTILINE)
    assert sorted(found) == sorted(streampack.__all__)


LOADED = re.compile(
    r'<(?:script|img|iframe|source)[^>]*src="(https?:)?//|<link[^>]*href="(https?:)?//|@import'
)


def test_the_pages_build_without_a_warning_or_a_request(tmp_path: Path) -> None:
    for package in ("sphinx", "myst_parser", "furo", "sphinx_copybutton"):
        pytest.importorskip(package)
    options = f"-q -b html -c docs -W -n -d {tmp_path / 'trees'}".split()
    command = [sys.executable, "-m", "sphinx", *options, str(ROOT), str(tmp_path / "html")]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert run.returncode == 0, run.stderr
    for page in (tmp_path / "html").rglob("*"):
        if page.suffix in (".html", ".css"):
            text = page.read_text(encoding="utf-8")
            assert not LOADED.search(text), page
            assert not re.search(r"url\((https?:)?//", text), page
