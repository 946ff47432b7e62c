"""Words and phrases that are hard to read in English, and what to write instead.

As a script: ``python tests/harness/plain_words.py PATH...`` prints each place, then a count by word.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

# A space in a pattern matches any white space, so a phrase is found across lines, in comments too. An underscore counts
# as the end of a word: names are read as well.
AVOID = {
    "anew": (r"anew", "again, from scratch"),
    "behind": (r"behind", "after"),
    "goes on": (r"(?:goes|go|going|went|gone)(?:_| )on", "continues, resumes"),
    "shall": (r"shall", "must, should, is"),
    "whoever": (r"whoever|whomever|(?:those|all|one|he|by|for) who", "callers, users, you"),
    "of which": (r"of which|of whose", "a second sentence"),
    "heeds": (r"heed(?:s|ed|ing)?", "uses, honors, applies"),
    "dear": (r"dear(?:er|est)?", "expensive"),
    "lies in": (
        r"(?:lies?|lay|lain|lying) (?:in|at|on|under|beside|there|with|before|between|about)",
        "is in",
    ),
    "is given": (r"(?:is|are|was|were|be|been|being) given", "receives, takes, passed to"),
    "hands out": (r"hand(?:s|ed|ing)? (?:it |them )?out", "returns, emits, yields"),
    "takes away": (r"(?:takes?|took|taken|taking)(?:_| )away", "removes"),
    "leaves out": (r"(?:leaves?|leaving|left)(?:_| )out", "skips, excludes"),
    "so many": (r"so many|as many as", "up to n, n"),
    "as a whole": (r"as a whole|whole (?:sample|piece|sequence|document|group)s?", "complete; unsplit"),
    "stands": (r"stands?(?! for)|stood(?! for)|standing", "is, is at; position"),
    "turn": (r"whose turn|in_turns?|\.turn", "generation, round robin"),
    "share": (r"rank's share|shares? of (?:a|the|its|their|one)(?: next)? batch", "shard"),
    "ahead": (r"(?:read)?ahead", "prefetch, in advance, before"),
    "waiting piece": (r"waiting (?:piece|sample)s?", "buffered piece"),
    "dealt": (r"dealt|deal(?:s|ing)? (?:it |them )?out", "assigned"),
    "seldom": (r"seldom", "rarely"),
    "often in a name": (r"often_\w+|\w+_often", "rare_..., frequent_..."),
    "translated": (r"translated", "remapped"),
    "Readers": (r"(?-i:Readers)", "Position"),
    "Stand": (r"(?-i:Stand)", "ReaderSnapshot"),
    "Found": (r"(?-i:Found)(?=[\](|,:])", "no type"),
    "Share": (r"(?-i:Share)", "shard, by what it is"),
    "ReadAhead": (r"(?-i:ReadAhead|READ_AHEAD)", "prefetch"),
}

# Good English that the patterns above would find.
FINE = (
    r"behind (?:a|the|its|their) (?:link|URL|proxy|gateway|server)",
    r"behind (?:URLs|nginx)",
    r"(?:fall|falls|falling|fell|fallen|lag|lags|left|furthest|far|further) behind",
    r"look(?:-|_| )?ahead|was `read_ahead`|stand-ins?",
    r"(?:if|unless|when|where|whether) [^.;:]{0,60}?(?:is|are|was|were) given",
)

SUFFIXES = (".py", ".md", ".yaml", ".toml", ".html")


def _pattern(words: str) -> str:
    return rf"(?<![A-Za-z])(?:{words})(?![A-Za-z])".replace(" ", r"(?:\s+#?\s*)")


EACH = {word: re.compile(_pattern(words), re.IGNORECASE) for word, (words, _) in AVOID.items()}
ALLOWED = re.compile("|".join(map(_pattern, FINE)), re.IGNORECASE)


def find(text: str) -> Iterator[tuple[int, str]]:
    """The line and the word of each place in a text, from line 1."""
    allowed = [match.span() for match in ALLOWED.finditer(text)]
    found = [
        (match.start(), word)
        for word, pattern in EACH.items()
        for match in pattern.finditer(text)
        if not any(start <= match.start() and match.end() <= stop for start, stop in allowed)
    ]
    for place, word in sorted(found):
        yield text.count("\n", 0, place) + 1, word


def files(path: Path) -> list[Path]:
    """The files of a folder that people write, or the file itself; what a benchmark printed is excluded."""
    if path.is_file():
        return [path]
    return sorted(
        each
        for each in path.rglob("*")
        if (each.suffix in SUFFIXES or each.name == "Makefile")
        and each.name != Path(__file__).name
        and not any(part.startswith(".") or part == "results" for part in each.relative_to(path).parts)
    )


if __name__ == "__main__":
    total: Counter[str] = Counter()
    for each in [file for path in sys.argv[1:] for file in files(Path(path))]:
        for line, word in find(each.read_text(encoding="utf-8")):
            print(f"{each}:{line}: {word}")
            total[word] += 1
    for word, number in total.most_common():
        print(f"{number:5} {word} -> {AVOID[word][1]}")
    print(f"{total.total():5} in all")
