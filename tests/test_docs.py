"""README and docs: every Python block runs as it is printed, and every link leads somewhere."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.support.hf_tokenizers import byte_level

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
OWN_TESTS = {
    "after_training.md",
    "encoders.md",
    "models.md",
}  # they need more than is printed


def blocks(page: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


WITH_BLOCKS = [page for page in PAGES if blocks(page) and page.name not in OWN_TESTS]


def test_there_are_pages_with_blocks() -> None:
    assert {"README.md", "data.md", "hugging_face.md", "several_devices.md"} <= {
        page.name for page in WITH_BLOCKS
    }


@pytest.mark.parametrize("page", WITH_BLOCKS, ids=lambda page: page.name)
@pytest.mark.filterwarnings("ignore")  # of transformers and TRL, which a reader sees and may ignore
def test_python_blocks_run_as_printed(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One after the other, in a folder with data/*.jsonl, with a small ``model`` and ``tokenizer``."""
    transformers = pytest.importorskip("transformers")
    if "trl" in page.read_text(encoding="utf-8"):
        pytest.importorskip("trl")
    (tmp_path / "data").mkdir()
    lines = [json.dumps({"text": "one two three " * (i % 7 + 1)}) for i in range(40)]
    (tmp_path / "data" / "rows.jsonl").write_text("\n".join(lines) + "\n")
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


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CONTRIBUTING.md"], ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8"))
    broken = [
        link
        for link in links
        if "://" not in link and not link.startswith("#") and not (page.parent / link.split("#")[0]).exists()
    ]
    assert not broken
