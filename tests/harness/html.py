"""A page as its tags, attributes and text; a tag that is not closed, or closed wrongly, is an error."""

from __future__ import annotations

from collections import Counter
from html.parser import HTMLParser

VOID = {"meta", "br", "img", "path", "polyline", "circle"}
EVIL = "</script></style></template><script>alert(1)</script> & \" ' <img src=x onerror=alert(2)>"
"""A text that does harm where it becomes markup."""


class Parsed(HTMLParser):
    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: Counter[str] = Counter()
        self.pairs: list[tuple[str, str]] = []
        self.cells: list[str] = []  # the texts between tags

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        self.pairs += [(name, value or "") for name, value in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag, f"</{tag}> closes another tag"

    def handle_data(self, data: str) -> None:
        if data.strip() and self.open[-1] not in ("script", "style"):
            self.cells.append(data)

    @property
    def text(self) -> str:
        return " ".join(self.cells)

    def values(self, name: str) -> list[str]:
        """The values of an attribute, in order."""
        return [value for each, value in self.pairs if each == name]

    def after(self, name: str, count: int) -> list[str]:
        """The texts that stand behind a text, such as the figures of a row of a table."""
        at = self.cells.index(name)
        return self.cells[at + 1 : at + 1 + count]


def parsed(text: str) -> Parsed:
    """Parse a page, of which no text may become markup: it has one script, its own, and it loads nothing."""
    found = Parsed()
    found.feed(text)
    found.close()
    assert not found.open, f"not closed: {found.open}"
    assert found.tags["script"] == 1
    assert "img" not in found.tags
    assert not {"src", "href", "action", "srcset"} & {name for name, _ in found.pairs}
    assert not [word for word in ("url(", "@import", "http:", "https:") if word in text]
    assert "default-src 'none'" in found.values("content")[0]
    assert len(set(found.values("id"))) == len(found.values("id"))
    named = " ".join(found.values("aria-labelledby")).split()
    assert set(named) <= set(found.values("id"))
    return found
