"""README and docs: blocks run as printed, links lead somewhere, and what is made from the code is up to date."""

from __future__ import annotations

import json
import re
import runpy
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
import torch
from omegaconf import OmegaConf

import streampack
from benchmarks.lengths import DISTRIBUTIONS, lengths, lower_bound
from docs.drawings import FOLDER, PICTURES
from docs.tables import DOCS, documented, put, tables
from streampack import IterablePackedDataset, cli
from streampack.training.config import RunConfig
from tests.harness.hf_tokenizers import byte_level
from tests.harness.models_table import BACKENDS, PAGE, read_page
from tests.harness.processes import run_ranks
from tests.harness.stock import SIZES, shrunk, shrunk_config
from tests.harness.stores import Versioned

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
OWN_TESTS = {"after_training.md", "models.md"}  # they need more than is printed
AGAIN = "`make docs` writes it again"


def blocks(page: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


README = ROOT / "README.md"
COMPARISON = ROOT / "docs" / "comparison.md"
RESULTS = ROOT / "benchmarks" / "results"


def rows_of(text: str) -> list[list[str]]:
    """The rows of a page's tables."""
    return [
        [cell.strip(" *") for cell in line.strip("|").split("|")]
        for line in text.splitlines()
        if line[:1] == "|"
    ]


def results(page: Path, name: str) -> dict[str, list[list[str]]]:
    """The tables of the run that a page names, by their headings."""
    [file] = re.findall(rf"benchmarks/results/({name}-\S+?\.md)", page.read_text(encoding="utf-8"))
    _, *parts = (RESULTS / file).read_text(encoding="utf-8").split("\n## ")
    return {part.partition("\n")[0]: rows_of(part) for part in parts}


def test_readme_is_short() -> None:
    text = README.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 90
    assert len(text.split()) <= 700


def test_readme_counts_the_families_of_the_page_of_models() -> None:
    families: dict[str, set[str]] = {"torchtune": set(), "transformers": set()}
    for (library, family, backend), outcome in read_page(PAGE.read_text(encoding="utf-8")).items():
        if backend in BACKENDS and not outcome.startswith("refused"):
            families[library].add(family.partition(",")[0])  # the rest names a variant
    tune, hf = len(families["torchtune"]), len(families["transformers"])
    text = " ".join(README.read_text(encoding="utf-8").split())
    assert f"{tune + hf} model families, {tune} of torchtune and {hf} of transformers" in text


def test_readme_has_the_figures_of_the_run_that_it_names() -> None:
    run = results(README, "paper")
    told = [row for row in rows_of(README.read_text(encoding="utf-8")) if "%" in row[1]]
    for (_, *cells), corpus in zip(told, ("flan", "orca", "stack"), strict=True):
        [padded] = [row for row in run[corpus] if row[0] == "random_padding"]
        [packed] = [row for row in run[corpus] if row[:2] == ["exact_fit", "1 pack"]]
        padding = " → ".join(f"{row[4].rstrip('%')} %" for row in (padded, packed))
        assert cells == [padding, f"{padded[6]} → {packed[6]}", f"{float(packed[7]):.1f}x"]


def test_the_comparison_has_the_figures_of_the_runs_that_it_names() -> None:
    text = COMPARISON.read_text(encoding="utf-8")
    density, inputs = results(COMPARISON, "density"), results(COMPARISON, "inputs")
    told = {row[0]: row[1:] for row in rows_of(text)}

    def cells(above: int, padding: float) -> str:
        return f"{above:,} ({padding:.{2 if padding < 1.5 else 1}f} %)"

    for label, row in told.items():
        packer = "exact_fit" if label.endswith("`num_lanes=1`") else label.replace("`", "")
        runs = [{each[0]: each for each in density[corpus]} for corpus in ("flan", "orca", "stack")]
        if packer in runs[0] and packer != "packer":
            found = [each[packer] for each in runs]
            assert row[:3] == [
                cells(int(run[2].replace(",", "")), float(run[3].rstrip("%"))) for run in found
            ]
    for name, cell in zip(DISTRIBUTIONS, told["streampack `exact_fit`, `num_lanes=8`"], strict=False):
        samples = lengths(name)
        rows = [{"input_ids": np.ones(length, np.int32)} for length in samples]
        packs = sum(1 for _ in IterablePackedDataset(rows, max_seq_len=4096).stream())
        above, padding = packs - lower_bound(samples, 4096), 100 * (1 - samples.sum() / (packs * 4096))
        assert cell == cells(above, padding), "the default is 8 lanes here"

    of_files = [rows for name, rows in inputs.items() if name.endswith(("Parquet", "datasets"))]
    assert len(of_files) == 3
    for label, packer in (
        ("torchtune 0.6.1 `PackedDataset`", "torchtune PackedDataset"),
        ("TRL 1.16.0 `bfd` with its collator", "TRL bfd, its collator"),
        ("Grain 0.2.18 best-fit, 64 bins", "Grain best-fit, 64 bins"),
    ):
        ratios = [float(row[2]) for rows in of_files for row in rows if row[0] == packer]
        assert told[label][0] == f"{min(ratios):.1f}x to {max(ratios):.1f}x"
    [ours] = [row for row in density["flan"] if row[0] == "exact_fit"]
    assert f"it is {float(ours[6]):.1f}x\nas fast as torchtune's packer" in text


def make_model(folder: Path) -> None:
    """A small model with a tokenizer and a chat template."""
    transformers = pytest.importorskip("transformers")
    byte_level(pad_token="</s>").save_pretrained(folder)
    sizes: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    config = transformers.LlamaConfig(vocab_size=1000, num_attention_heads=2, pad_token_id=0, **sizes)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)


def make_data(folder: Path) -> None:
    """Write data/*.jsonl and chats/*.jsonl."""
    (folder / "data").mkdir()
    lines = [json.dumps({"text": "one two three " * (i % 7 + 1)}) for i in range(40)]
    (folder / "data" / "rows.jsonl").write_text("\n".join(lines) + "\n")
    (folder / "chats").mkdir()
    turns = [{"role": "user", "content": "what is this"}, {"role": "assistant", "content": "a test"}]
    (folder / "chats" / "rows.jsonl").write_text((json.dumps({"messages": turns}) + "\n") * 400)


def fences(page: Path) -> list[tuple[str, str]]:
    """The language and the text of each block of code of a page."""
    text = page.read_text(encoding="utf-8").replace("\\\n ", "")
    return re.findall(r"^```([{}\w]*)\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


class Bucket(Versioned):
    """``s3://`` in memory."""

    protocol = "s3"

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return super()._strip_protocol(path.removeprefix("s3://"))


STOCK = "qwen2_5/0.5B_full_single_device"


def exit_code(main: Callable[[], Any]) -> Any:
    """What a program exits with: returned or raised."""
    try:
        return main() or 0
    except SystemExit as end:
        return end.code or 0


class Shell:
    """Runs lines of a shell in this process; downloads are skipped, and a stock config reads small local files."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.patch = patch
        once = {"max_steps_per_epoch": 1, "gradient_accumulation_steps": 1}
        stock = shrunk_config(STOCK, folder, **once)
        keys = "device tokenizer.path tokenizer.merges_file checkpointer.checkpoint_dir dataset.source"
        keys += " dataset.data_files dataset.split max_steps_per_epoch gradient_accumulation_steps"
        self.local = [f"{key}={OmegaConf.select(stock, key)}" for key in keys.split()]

    def __call__(self, line: str) -> None:
        program, *words = shlex.split(line)
        if program == "pip":
            [wanted] = re.findall(r"\.\[(.*)\]", words[1])
            extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
            assert set(wanted.split(",")) <= set(extras)
        elif program == "python":
            assert words[0] == "-m"
            runpy.run_module(words[1])["main"](words[2:])
            assert "chats/rows.jsonl" in Path("outputs/chat/report.html").read_text()
            assert json.loads(Path("outputs/chat/config.json").read_text())["use_cache"]
        elif program == "tune" and words[0] == "run":
            from torchtune._cli.tune import main

            local = [f"output_dir=outputs/{'mine' if 'my.yaml' in words else 'stock'}", *self.local]
            written = {word.partition("=")[0] for word in words}
            local = [each for each in local if each.partition("=")[0] not in written]
            self.patch.setattr(sys, "argv", ["tune", *words, *local])
            assert exit_code(main) == 0
            assert list(Path("outputs").rglob("epoch_0/*.safetensors"))
        elif program == "streampack":
            quick = {"run": ["max_steps=1"], "validate": self.local}
            assert exit_code(lambda: cli.main([*words, *quick.get(words[0], [])])) == 0
        else:
            assert (program, words[0]) == ("tune", "download")


TUTORIALS = [README, *sorted((ROOT / "docs" / "tutorials").glob("*.md"))]
GUIDES = [page for page in PAGES if blocks(page) and page not in TUTORIALS and page.name not in OWN_TESTS]


def test_there_are_pages_with_blocks() -> None:
    assert {"index.md", "data.md", "several_devices.md"} <= {page.name for page in GUIDES}
    for page, line in zip(
        TUTORIALS, ("python -m", "python -m", "run full_finetune", "validate", "run dpo"), strict=True
    ):
        assert any(line in text for language, text in fences(page) if not language), page


@pytest.fixture
def bucket(tmp_path: Path) -> Iterator[None]:
    before = fsspec.get_filesystem_class("s3")
    fsspec.register_implementation("s3", Bucket, clobber=True)
    yield
    fsspec.register_implementation("s3", before, clobber=True)


@pytest.mark.parametrize("page", [*TUTORIALS, *GUIDES], ids=lambda page: page.stem)
@pytest.mark.usefixtures(shrunk.__name__, bucket.__name__)
@pytest.mark.filterwarnings("ignore")  # of other libraries, which a reader sees and may ignore
def test_blocks_run_as_printed(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python one after the other, in a folder with small data and ``my_model``; in tutorials lines of a shell, too.

    Guides have ``model`` and ``tokenizer``.
    """
    transformers = pytest.importorskip("transformers")
    for name in ("trl", "rich"):
        if name == "rich" or name in page.read_text(encoding="utf-8"):
            pytest.importorskip(name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setitem(SIZES, "max_seq_len", 4096)
    make_model(tmp_path / "my_model")
    make_data(tmp_path)
    Bucket(skip_instance_cache=True).pipe("/my-bucket/text/a.jsonl", Path("data/rows.jsonl").read_bytes())
    names: dict[str, Any] = {"__name__": "page"}
    if page in GUIDES:
        names["model"] = transformers.AutoModelForCausalLM.from_pretrained("my_model")
        names["tokenizer"] = byte_level()
    shell = Shell(tmp_path, monkeypatch) if page in TUTORIALS else None
    for number, (language, block) in enumerate(fences(page)):
        if language == "python":
            exec(compile(block, f"{page.name}, block {number}", "exec"), names)
        elif not language and shell:
            for line in block.splitlines():
                shell(line)


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


def test_files_that_the_pages_name_exist() -> None:
    folders = (ROOT, ROOT / "streampack", ROOT / "benchmarks")
    pattern = r"`((?:[\w.]+/)+\w+\.(?:py|md|yaml))`"
    named = {path for page in LINKED for path in re.findall(pattern, prose(page))}
    assert not [path for path in named if not any((folder / path).exists() for folder in folders)]
    assert len(named) > 30


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
