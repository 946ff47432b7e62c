"""The page of a run: self-contained, escaped, small, and true to what was logged."""

from __future__ import annotations

import math
from html.parser import HTMLParser
from typing import Any

from streampack.accounting import Ledger
from streampack.inspection.report import PackView, Run, Sequence
from streampack.inspection.run_page import render
from streampack.inspection.run_report import RunReport

NASTY = "</script></style><script>alert(1)</script> & \"'"
VOID = {"meta", "link"}  # others without an end are written as <path/>


class Page(HTMLParser):
    """The tags, texts and attributes of a page; fails where tags do not close in order."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)

    def attributes(self, name: str) -> list[str | None]:
        return [attrs[name] for _, attrs in self.tags if name in attrs]


def pack(sequences: int = 2, text: str = "what?") -> PackView:
    views = [
        Sequence(
            f"rows.jsonl:{i}", None, 10 * i, 10, (0, 10), 6,
            [Run(10 * i, 10 * i + 4, False, text), Run(10 * i + 4, 10 * i + 10, True, "an answer")],
        )
        for i in range(sequences)
    ]  # fmt: skip
    size = 10 * sequences + 5
    return PackView(0, 0, size, 5, views, [*range(0, 10 * sequences + 1, 10), size])


def report(**changes: Any) -> RunReport:
    ledger = Ledger(samples=40, tokens_in=1000, packs=10, capacity=1000, packed=900)
    ledger.drop("truncated", 60)
    plain: dict[str, Any] = {
        "title": "my_run", "ended": "finished after 2 steps", "in_effect": {"attention": "varlen, as it is"},
        "config": "seed: 0\n",
        "metrics": {0: {"validation_loss": 4.5}, 1: {"loss": 4.0, "padding": 0.1}, 2: {"loss": 3.0, "padding": 0.2}},
        "ledger": ledger.as_dict(), "sources": [], "packs": [(1, pack())],
    }  # fmt: skip
    return RunReport(**plain | changes)


def test_the_page_says_what_was_logged_and_where_the_tokens_went() -> None:
    page = Page(render(report()))
    texts = " ".join(page.texts)
    for expected in ("Run my_run", "finished after 2 steps", "varlen, as it is", "seed: 0", "4.000 → 3.000"):
        assert expected in texts
    cells = [text for text in page.texts if text.strip()]
    at = cells.index("dropped: truncated")
    assert cells[at : at + 3] == ["dropped: truncated", "60", "6.00%"]
    at = cells.index("training loss")
    assert cells[at : at + 9] == ["training loss", "nats", "4", "3", "3", "2", "4", "1", "3.5"]
    at = cells.index("padding", at)
    assert cells[at : at + 9] == ["padding", "% of a pack", "10", "20", "10", "1", "20", "2", "15"]


def test_nothing_is_requested_and_nothing_runs() -> None:
    page = Page(render(report()))
    assert "script" not in {tag for tag, _ in page.tags}
    assert page.attributes("src") == []
    assert page.attributes("href") == ["data:,"]
    style = render(report()).partition("<style>")[2].partition("</style>")[0]
    assert "url(" not in style
    assert "@import" not in style
    assert not [name for _, attrs in page.tags for name in attrs if name.startswith("on")]


def test_every_text_is_escaped() -> None:
    sources = [NASTY]
    metrics = {1: {f"source_{NASTY}_fraction": 1.0, "loss": 2.0}}
    nasty = report(
        title=NASTY, ended=NASTY, in_effect={NASTY: NASTY}, config=NASTY, sources=sources, metrics=metrics,
        packs=[(1, pack(text=NASTY))],
    )  # fmt: skip
    page = Page(render(nasty))
    assert "script" not in {tag for tag, _ in page.tags}
    assert "".join(page.texts).count("alert(1)") >= 8


def test_a_loss_that_is_not_finite_is_said_and_breaks_nothing() -> None:
    metrics = {1: {"loss": 2.0}, 2: {"loss": math.nan}, 3: {"loss": math.inf}}
    html = render(report(metrics=metrics))
    Page(html)
    assert "A cross marks a step" in html
    assert "not finite" in html
    only = render(report(metrics={1: {"loss": math.nan, "validation_loss": math.nan}}))
    assert "not finite" in only
    assert "A cross marks" not in render(report())


def test_a_run_that_logged_nothing_has_a_page() -> None:
    html = render(report(metrics={}, ledger={}, packs=[], in_effect={}))
    Page(html)
    assert "Nothing was logged" in html


def test_a_long_run_of_full_packs_is_below_a_megabyte() -> None:
    names = ("loss", "padding", "tokens_per_second", "data_wait", "cost_imbalance", "grad_norm", "lr")
    metrics = {step: dict.fromkeys(names, step * 7919 % 1000 / 7) for step in range(1, 100_001)}
    many = report(
        metrics=metrics, packs=[(1, pack(sequences=400, text="<" * 240))] * 4, config="x: <\n" * 200_000
    )
    assert len(render(many).encode()) < 1_000_000


def test_every_picture_has_a_name_and_every_table_can_be_scrolled_by_keyboard() -> None:
    page = Page(render(report()))
    ids = page.attributes("id")
    assert len(ids) == len(set(ids))
    for tag, attrs in page.tags:
        if tag == "svg":
            assert attrs["role"] == "img"
            named = (attrs.get("aria-labelledby") or "").split()
            assert attrs.get("aria-label") or (named and set(named) <= set(ids))
        if attrs.get("class") == "wide":
            assert attrs["tabindex"] == "0"


def test_a_mixture_has_a_table_of_its_sources() -> None:
    metrics = {
        1: {"loss": 2.0, "source_web_fraction": 0.5, "source_web_trained": 10, "source_web_epochs": 1},
        2: {"loss": 2.0, "source_web_fraction": 0.75, "source_web_trained": 30, "source_web_epochs": 2},
    }
    cells = [text for text in Page(render(report(metrics=metrics, sources=["web"]))).texts if text.strip()]
    at = cells.index("web")
    assert cells[at : at + 4] == ["web", "75.00%", "30", "2"]
