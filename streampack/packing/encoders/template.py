"""`ChatTemplate`: renders conversations to tokens, and finds the tokens that are trained."""

from __future__ import annotations

import datetime
import re
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from streampack.packing.encoders.conversation import REASONING
from streampack.packing.encoders.steps import Steps, Text, Tokens

MARKER = re.compile(r"\{%-?\s*generation\s*-?%\}")
DATE = re.compile(r"""strftime_now\(\s*(["'])(.*?)\1\s*\)""")

CONTEXT = 32
"""Tokens before a boundary that are made once more; half of them are compared."""

Messages = Sequence[Mapping[str, Any]]


class ChatTemplate:
    """A Jinja chat template that renders conversations to tokens, and finds the tokens of each message.

    Where the template marks answers with ``{% generation %}``, those are the answers. Otherwise the conversation before
    an answer is rendered with a generation prompt, and the answer is the text after that. Either way the tokens up to
    each boundary must equal those of the text up to there alone, as at inference; a row where they differ is refused.

    Args:
        templates: the Jinja texts for conversations without tools, and with tools.
        settings: variables of the template: special tokens, and the user's.
        date: as for `HFTokenizer`.
    """

    def __init__(
        self,
        templates: Sequence[str],
        *,
        settings: Mapping[str, Any],
        date: str | None = None,
    ) -> None:
        if date is not None:
            day = datetime.date.fromisoformat(date)
            templates = [DATE.sub(lambda call: repr(day.strftime(call[2])), text) for text in templates]
        self.templates = [(text, MARKER.search(text) is not None) for text in templates]
        self.settings = dict(settings)

    def steps(
        self, messages: Messages, trained: Sequence[bool], *, tools: Any = None
    ) -> Steps[tuple[list[int], npt.NDArray[np.bool_]]]:
        """Return token ids, and a mask of those to train: the tokens of the messages that are ``trained``."""
        text, spans = self._whole(messages, tools)
        [whole] = yield from self._tokens(text, starts=True)
        mask = np.zeros(len(whole.ids), dtype=bool)
        answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        chosen = [i for i, flag in enumerate(trained) if flag]
        if len(chosen) == len(messages) > len(answers):  # every token is trained, so no boundaries are needed
            mask[:] = True
            return whole.ids, mask
        marked = {}
        if spans is not None and set(chosen).issubset(answers):
            if len(spans) != len(answers):
                raise ValueError(
                    f"the chat template marks {len(spans)} stretch(es) with {{% generation %}} in a conversation of "
                    f"{len(answers)} answer(s); mark each answer once"
                )
            marked = dict(zip(answers, spans, strict=True))
        places: dict[int, int] = {}  # boundaries in the text, each with its message
        found = []
        for i in chosen:
            span = marked.get(i) or self._by_prefix(messages, i, text, tools)
            if _end_of(messages[i]["content"]) not in text[slice(*span)]:
                raise ValueError(
                    f"what the chat template marks with {{% generation %}} for message {i} does not hold its content; "
                    "set the markers around it"
                )
            found.append(span)
            places |= {at: i for at in span if at not in places}
        counts = yield from self._counts(text, whole, places)
        for start, stop in found:
            mask[counts[start] : counts[stop]] = True
        return whole.ids, mask

    def prompt(self, messages: Messages, *, tools: Any = None) -> Steps[list[int]]:
        """Return the token ids of a conversation followed by a generation prompt, as at inference."""
        self._whole(messages, tools)
        [made] = yield from self._tokens(self.render(messages, tools=tools, prompt=True)[0])
        return made.ids

    def begun(self, text: str, tokens: Tokens) -> Tokens:
        """Return the tokens of a rendered text as the model expects its beginning."""
        return tokens

    def _tokens(self, *texts: str, starts: bool = False) -> Steps[list[Tokens]]:
        made = yield [Text(text, starts=starts) for text in texts]
        return [self.begun(text, tokens) for text, tokens in zip(texts, made, strict=True)]

    def render(
        self, messages: Messages, *, tools: Any = None, prompt: bool = False
    ) -> tuple[str, list[tuple[int, int]] | None]:
        """Render a conversation; also return the (start, end) of each stretch that the template marks as generated."""
        from jinja2 import TemplateError
        from transformers.utils.chat_template_utils import render_jinja_template

        template, marks = self.templates[bool(tools)]
        try:
            [text], spans = render_jinja_template(
                conversations=[[dict(message) for message in messages]],
                tools=tools,
                chat_template=template,
                add_generation_prompt=prompt,
                return_assistant_tokens_mask=marks,
                **self.settings,
                strftime_now=None,  # a resumed run must render the same text on another day
            )
        except (TemplateError, TypeError) as error:
            if isinstance(error, TypeError) and "strftime_now" in template:
                raise ValueError(
                    "the chat template writes today's date, so a run could not continue tomorrow with the same tokens; "
                    'say which date to write: date: "2025-01-31"'
                ) from error
            raise ValueError(f"the chat template refuses the conversation: {error}") from error
        return text, list(spans[0]) if marks else None

    def _by_prefix(self, messages: Messages, i: int, text: str, tools: Any) -> tuple[int, int]:
        """Find message ``i`` in the text by rendering the conversation without it, and with it."""
        asks = messages[i]["role"] == "assistant"
        if asks and not i:
            raise ValueError(
                "the conversation begins with an answer, and the chat template does not mark where it begins; begin "
                "with a message of the user, or mark answers with {% generation %}"
            )
        before = self.render(messages[:i], tools=tools, prompt=asks)[0] if i else ""
        after = self.render(messages[: i + 1], tools=tools)[0] if messages[i + 1 :] else text
        for count, head in ((i, before), (i + 1, after)):
            if not text.startswith(head):
                at = next(at for at, letter in enumerate(head) if text[at : at + 1] != letter)
                raise ValueError(
                    f"the chat template renders the first {count} message(s) in another way when others follow "
                    f"({head[at : at + 24]!r} becomes {text[at : at + 24]!r}), so the answers' tokens cannot be told "
                    "apart; give a chat_template that marks the answers with {% generation %} ... "
                    "{% endgeneration %}, or train the last answer only (answers: last)"
                )
        return len(before), len(after)

    def _counts(self, text: str, whole: Tokens, places: Mapping[int, int]) -> Steps[dict[int, int]]:
        """Return the numbers of tokens before places in the text; raise if they depend on the text after them.

        The tokens shortly before a place are made once more without what follows. Where these are others, or nothing is
        known of where tokens begin, all of the text before is tokenized once more, in time squared in a conversation's
        length.
        """
        ids = whole.ids
        counts = {at: len(ids) if at else 0 for at in places if at in (0, len(text))}
        starts = whole.starts or ()
        near = {at: bisect_left(starts, at) for at in places if at not in counts}
        near = {at: count for at, count in near.items() if count > CONTEXT}
        cut = [text[starts[count - CONTEXT] : at] for at, count in near.items()]
        again = (yield from self._tokens(*cut)) if cut else []
        for (at, count), tokens in zip(near.items(), again, strict=True):
            # Where a text is cut open, its first tokens may be others.
            if tokens.ids[-CONTEXT // 2 :] == ids[count - CONTEXT // 2 : count]:
                counts[at] = count
        rest = [at for at in places if at not in counts]
        heads = (yield from self._tokens(*[text[:at] for at in rest])) if rest else []
        for at, head in zip(rest, heads, strict=True):
            if ids[: len(head.ids)] != head.ids:
                raise ValueError(
                    f"a token crosses a boundary of message {places[at]}: the text before {text[at : at + 16]!r} makes "
                    "other tokens alone than with what follows, so no mask is right; let the chat template set a "
                    "special token there, or white space on the other side of it"
                )
            counts[at] = len(head.ids)
        return counts

    def _whole(self, messages: Messages, tools: Any) -> tuple[str, list[tuple[int, int]] | None]:
        """Render a conversation; raise if the template drops a message, a tool, a call or the last reasoning."""
        text, spans = self.render(messages, tools=tools)
        at = 0
        for i, message in enumerate(messages):
            tail = _end_of(message["content"])
            found = text.find(tail, at)
            if found >= 0:
                at = found + len(tail)
                continue
            # The content may be out of order, escaped, or dropped. If it is dropped, changing it changes nothing.
            changed = [dict(m, content="x" if m is message else m["content"]) for m in messages]
            if self.render(changed, tools=tools)[0] == text:
                raise ValueError(
                    f"the chat template drops message {i}, of role {message['role']!r}; give it a role that "
                    "the template knows, or another chat_template"
                )
        parts = [
            (f"the tool_calls of message {i}", call["function"]["name"])
            for i, message in enumerate(messages)
            for call in message.get("tool_calls", ())
        ]
        names = [tool.get("function", tool).get("name", "") for tool in tools or ()]
        parts += [(f"the tool {name!r}", name) for name in names]
        if (last := messages[-1])["role"] == "assistant":
            thoughts = (last[key] for key in REASONING if isinstance(last.get(key), str))
            parts.append(("the reasoning of the last message", _end_of(next(thoughts, ""))))
        for what, needed in parts:
            if needed not in text:
                raise ValueError(
                    f"the chat template drops {what}; give a chat_template that renders it, remove it from the "
                    "row, or say ignore: [tools] if it is tools"
                )
        return text, spans


def _end_of(content: str) -> str:
    """Return the last characters of a message's content, without white space at its ends, which templates trim."""
    return content.strip()[-32:].strip()
