from __future__ import annotations

from streampack.inspection.page import Bar, Fact, bars, bullets, facts, page, paragraph, section, table
from tests.harness.html import parsed

EVIL = "</script></style></template><script>alert(1)</script> & \" ' <img src=x onerror=alert(2)>"


def test_all_text_is_escaped() -> None:
    parts = [
        section(EVIL, paragraph(EVIL), bullets([EVIL])),
        facts([Fact(EVIL, EVIL, EVIL)]),
        table([EVIL, EVIL], [[EVIL, EVIL]], caption=EVIL, text=[1]),
        bars([Bar(EVIL, 1.0, EVIL, hatched=0.5)], caption=EVIL, columns=(EVIL, EVIL, EVIL)),
    ]
    found = parsed(page(EVIL, parts))
    assert found.tags["script"] == 1, "the page's own"
    assert "img" not in found.tags
    assert found.text.count(EVIL) == 1 + 3 + 3 + 5 + 6
    assert EVIL in found.values("data-label")


def test_it_loads_nothing() -> None:
    text = page("title", [])
    found = parsed(text)
    assert not {"src", "href", "action", "srcset"} & found.attributes
    assert "url(" not in text
    assert "@import" not in text
    assert "http:" not in text
    assert "https:" not in text
    assert "default-src 'none'" in found.values("content")[0]
    assert found.values("lang") == ["en"]


def test_a_table_names_its_rows_and_columns() -> None:
    found = parsed(table(["way", "packs"], [["a", 1], ["b", 2]], chosen=1))
    assert found.values("scope") == ["col", "col", "row", "row"]
    assert found.values("data-label") == ["packs", "packs"]
    assert found.values("class") == ["cards", "chosen"]


def test_bars_are_relative_to_the_longest() -> None:
    found = parsed(
        bars(
            [Bar("a", 50, ""), Bar("b", 200, "", hatched=0.25), Bar("c", 0, "")],
            caption="",
            columns=("", "", ""),
        )
    )
    assert found.values("style") == ["width:25.000%", "width:100.000%", "width:25.000%;margin-left:auto"]
