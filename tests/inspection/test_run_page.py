"""The page of a run: self-contained, escaped, small, and true to what was logged."""

from __future__ import annotations

import math
import re
from html import unescape
from typing import Any

from streampack.accounting import Ledger
from streampack.inspection.report import PackView, Run, Sequence
from streampack.inspection.run_page import run_page
from streampack.inspection.run_report import RunReport
from tests.harness.html import parsed
from tests.inspection.test_page import EVIL


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


def cells(html: str) -> list[str]:
    """The texts between tags."""
    return [unescape(text) for text in re.findall(r">([^<>]+)<", html.partition("<body>")[2]) if text.strip()]


def after(found: list[str], name: str, count: int, *, start: int = 0) -> list[str]:
    at = found.index(name, start)
    return found[at + 1 : at + 1 + count]


def test_the_page_says_what_was_logged_and_where_the_tokens_went() -> None:
    found = cells(run_page(report()))
    for expected in ("Run my_run", "finished after 2 steps", "varlen, as it is", "seed: 0\n"):
        assert expected in found
    assert after(found, "loss", 2) == ["3.000", "at step 2; 4.000 at step 1"]
    assert after(found, "dropped: truncated", 2) == ["60", "6.00%"]
    assert after(found, "training loss, nats", 7) == ["4", "3", "3", "2", "4", "1", "3.5"]
    assert after(found, "padding, % of a pack", 7) == ["10", "20", "10", "1", "20", "2", "15"]
    assert after(found, "step 1", 1) != []


def test_every_text_is_escaped() -> None:
    metrics = {1: {f"source_{EVIL}_fraction": 1.0, "loss": 2.0}}
    nasty = report(
        title=EVIL, ended=EVIL, in_effect={EVIL: EVIL}, config=EVIL, sources=[EVIL], metrics=metrics,
        packs=[(1, pack(text=EVIL))],
    )  # fmt: skip
    page = parsed(run_page(nasty))
    assert page.tags["script"] == 1, "the page's own"
    assert "img" not in page.tags
    # Title twice, end, both of in_effect, settings, source, and a prompt for each of two sequences.
    assert page.text.count(EVIL) == 9


def test_a_loss_that_is_not_finite_is_said_and_breaks_nothing() -> None:
    metrics = {1: {"loss": 2.0}, 2: {"loss": math.nan}, 3: {"loss": math.inf}}
    html = run_page(report(metrics=metrics))
    parsed(html)
    assert "A cross marks a step" in html
    assert "not finite" in html
    only = run_page(report(metrics={1: {"loss": math.nan, "validation_loss": math.nan}}))
    assert "not finite" in only
    assert "A cross marks" not in run_page(report())


def test_a_run_that_logged_nothing_has_a_page() -> None:
    html = run_page(report(metrics={}, ledger={}, packs=[], in_effect={}))
    parsed(html)
    assert "Nothing was logged" in html


def test_a_long_run_of_full_packs_is_bounded() -> None:
    names = ("loss", "padding", "tokens_per_second", "data_wait", "cost_imbalance", "grad_norm", "lr")
    metrics = {step: dict.fromkeys(names, step * 7919 % 1000 / 7) for step in range(1, 100_001)}
    many = report(
        metrics=metrics, packs=[(1, pack(sequences=40, text="x" * 240))] * 4, config="x: <\n" * 200_000
    )
    assert len(run_page(many).encode()) < 1_000_000


def test_every_picture_has_a_name() -> None:
    page = parsed(run_page(report()))
    ids = page.values("id")
    assert len(ids) == len(set(ids))
    assert page.tags["svg"] == page.values("role").count("img")
    named = " ".join(page.values("aria-labelledby")).split()
    assert len(named) == 2 * page.tags["svg"]
    assert set(named) <= set(ids)


def test_a_mixture_has_a_table_of_its_sources() -> None:
    metrics = {
        1: {"loss": 2.0, "source_web_fraction": 0.5, "source_web_trained": 10, "source_web_epochs": 1},
        2: {"loss": 2.0, "source_web_fraction": 0.75, "source_web_trained": 30, "source_web_epochs": 2},
    }
    assert after(cells(run_page(report(metrics=metrics, sources=["web"]))), "web", 3) == ["75.00%", "30", "2"]
