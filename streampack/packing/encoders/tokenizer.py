"""`HFTokenizer`, and what all encoders do with a tokenizer."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from itertools import chain
from os import PathLike
from pathlib import Path
from typing import Any

from streampack.packing.encoders.giants import PART, can_be_cut, cut_giant
from streampack.packing.encoders.steps import Steps, Text, Tokens, attempt, run
from streampack.packing.encoders.template import ChatTemplate
from streampack.packing.pretrained import load_pretrained, tokenize_in_one_thread_after_forks
from streampack.validation import require_positive, warn_user

PROBE_TEXT = "The quick brown fox: 0123456789, naïve 漢字, def f(x): return x\n"
"""The text on which tokenizers are checked."""

TORCHTUNE_ROLES = {"ipython": "tool"}
"""torchtune's names of roles, and the names that chat templates have for them, where they differ."""


class HFTokenizer:
    """A Hugging Face tokenizer for our encoders and recipes, and for torchtune's datasets.

    BOS and EOS are added exactly where they are asked for, whatever the tokenizer adds by itself (its post-processor,
    ``add_bos_token``, ``add_eos_token``). Texts are never truncated. Conversations are rendered by the chat template,
    which writes its own BOS. In a config: ``tokenizer: {_component_: streampack.HFTokenizer, path: my_model}``.

    Args:
        path: a folder, a name on the Hub, or a loaded tokenizer, which is copied.
        chat_template: Jinja text, or the path of a file with it, in place of the tokenizer's own.
        template_kwargs: more variables of the template, such as ``{"enable_thinking": False}``.
        date: the date (YYYY-MM-DD) that a template writes in place of today's.
        revision: branch, tag or commit on the Hub.
        max_seq_len: as in torchtune's configs: what torchtune's own datasets cut conversations to. `packed_dataset`
            takes the length of packs from it. Encoders and our datasets cut nothing by it; ``overlong`` decides.

    Raises:
        ValueError: if there is no tokenizer, or it adds special tokens where they were not asked for.
    """

    def __init__(
        self,
        path: Any,
        *,
        chat_template: str | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        date: str | None = None,
        revision: str | None = None,
        max_seq_len: int | None = None,
    ) -> None:
        if isinstance(path, str | PathLike):
            from transformers import AutoTokenizer

            self.name = str(Path(path).expanduser())
            self.tokenizer: Any = load_pretrained(
                AutoTokenizer, path, what="Hugging Face tokenizer", file="tokenizer_config.json",
                settings={"revision": revision or "main"},
            )  # fmt: skip
        else:
            self.name, self.tokenizer = type(path).__name__, copy.deepcopy(path)
        self._backend = _backend(self.tokenizer)
        # torchtune's datasets read this attribute of a tokenizer.
        self.max_seq_len = None if max_seq_len is None else require_positive(max_seq_len, "max_seq_len")
        if chat_template is not None:
            if "{" not in chat_template:
                chat_template = Path(chat_template).expanduser().read_text(encoding="utf-8")
            self.tokenizer.chat_template = chat_template
        self._template_settings = {**self.tokenizer.special_tokens_map, **(template_kwargs or {})}
        self._date = date
        self.bos_id: int | None = self.tokenizer.bos_token_id
        self.eos_id: int | None = self.tokenizer.eos_token_id
        self.stop_tokens = [] if self.eos_id is None else [self.eos_id]
        self.vocab_size = 1 + max(self.tokenizer.get_vocab().values(), default=-1)
        pad = self.tokenizer.pad_token_id
        # Padding is never attended and never trained, so any id will do.
        self.pad_id: int = pad if pad is not None else self.eos_id or 0
        body, whole = self._ids(PROBE_TEXT), self._ids(PROBE_TEXT, special=True)
        if {self.bos_id, self.eos_id}.intersection((*body[:1], *body[-1:])):
            raise ValueError(
                f"the tokenizer {self.name} adds BOS or EOS, though add_special_tokens=False forbids it"
            )
        at = next((i for i in range(len(whole)) if whole[i : i + len(body)] == body), 0)
        self._own_prefix = whole[:at]

    def __repr__(self) -> str:
        return f"HFTokenizer({self.name!r}, vocab_size={self.vocab_size})"

    def encode(self, text: str, add_bos: bool | None = True, add_eos: bool = True) -> list[int]:
        """Tokenize a text. ``add_bos=None`` begins it as the tokenizer does by itself.

        As with torchtune's tokenizers, ``add_bos=True`` adds nothing where there is no BOS token. Without an EOS token,
        ``add_eos=True`` is an error. A text that has its own BOS or EOS gets no second one.
        """
        return self._with_ends(self._ids(text), add_bos, add_eos)

    def _with_ends(self, ids: list[int], add_bos: bool | None, add_eos: bool) -> list[int]:
        if add_eos and self.eos_id is None:
            raise ValueError(
                f"the tokenizer {self.name} has no EOS token; set its eos_token, or say add_eos: False"
            )
        begin = self._own_prefix if add_bos is None else [self.bos_id] * (add_bos and self.bos_id is not None)
        end = [self.eos_id] * (add_eos and ids[-1:] != [self.eos_id])
        return [*(begin if ids[: len(begin)] != begin else ()), *ids, *end]

    def encode_many(self, texts: Sequence[Text]) -> list[Tokens | Exception]:
        """Tokenize texts as one by one, several in one call of the tokenizers library, which uses all cores.

        A text that cannot be tokenized has the exception.
        """
        if not self.in_batches:
            return [attempt(self._tokens, text) for text in texts]
        parts = [self._parts(text) for text in texts]
        if sum(map(len, parts)) < 2:
            return [attempt(self._tokens, text) for text in texts]
        # It does not count where tokens begin, and so takes half of the time.
        fast = not any(text.starts for text in texts)
        encode = self._backend.encode_batch_fast if fast else self._backend.encode_batch
        made = iter(encode(list(chain(*parts)), add_special_tokens=False))
        return [
            attempt(self._tokens, text, [next(made) for _ in of_text])
            for text, of_text in zip(texts, parts, strict=True)
        ]

    def _parts(self, text: Text) -> list[str]:
        """Return the parts of a text to tokenize; none of one that cannot be."""
        if isinstance(attempt(require_unicode, text.text), Exception):
            return []
        giant = len(text.text) > 2 * PART and not text.starts and self._cuts_giants
        return cut_giant(text.text) if giant else [text.text]

    @cached_property
    def _cuts_giants(self) -> bool:
        return can_be_cut(self._backend)

    def _tokens(self, text: Text, encoded: Sequence[Any] = ()) -> Tokens:
        require_unicode(text.text)
        if not encoded and self._backend is not None:
            encoded = [self._backend.encode(text.text, add_special_tokens=False)]
        ids = [*chain(*(part.ids for part in encoded))] if encoded else self._ids(text.text)
        known = text.starts and encoded  # only fast tokenizers know
        starts = [start for start, _ in encoded[0].offsets] if known else None
        return Tokens(self._with_ends(ids, text.add_bos, text.add_eos), starts)

    @property
    def in_batches(self) -> bool:
        """Whether `encode_many` is faster than one by one."""
        return self._backend is not None

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        """Decode token ids, special tokens included by default."""
        settings = {"skip_special_tokens": skip_special_tokens, "clean_up_tokenization_spaces": False}
        return str(self.tokenizer.decode([int(i) for i in token_ids], **settings))

    @property
    def has_template(self) -> bool:
        """Whether there is a chat template."""
        return bool(self.tokenizer.chat_template)

    @cached_property
    def chat(self) -> ChatTemplate:
        """The chat template; a warning says so if it ends no answer with a special token that is trained."""
        if not self.has_template:
            raise ValueError(
                f"the tokenizer {self.name} has no chat template; give it one: chat_template: my.jinja"
            )
        chat = ChatTemplate(
            [self.tokenizer.get_chat_template(tools=tools) for tools in (None, list[Any]())],
            settings=self._template_settings,
            date=self._date,
        )
        talk = [{"role": "user", "content": PROBE_TEXT}, {"role": "assistant", "content": "Yes."}]
        special = {*self.tokenizer.all_special_ids, *self.tokenizer.added_tokens_decoder}
        with suppress(ValueError):  # of a template that refuses this conversation
            ids, trained = run(chat.steps(talk, [False, True]), self.encode_many)
            if special and special.isdisjoint(
                token for token, flag in zip(ids, trained, strict=True) if flag
            ):
                warn_user(
                    f"the chat template of {self.name} ends no answer with a special token that is trained, so the "
                    "model does not learn to stop; set {% endgeneration %} after the end-of-turn token, or add one"
                )
        return chat

    def tokenize_messages(
        self, messages: Sequence[Any], *, inference: bool = False
    ) -> tuple[list[int], list[bool]]:
        """Tokenize torchtune's messages: ids and mask (True: not trained). ``inference`` adds a generation prompt.

        A conversation is cut to ``max_seq_len``, and keeps the EOS that it ended with.
        """
        if not inference:
            return run(self.steps(messages), self.encode_many)
        converted = _plain_messages(messages)
        # torchtune's generation asks for an answer by an empty message at the end.
        if converted[-1] == {"role": "assistant", "content": ""}:
            converted.pop()
        ids = self._ids(self.chat.render(converted, prompt=True)[0])
        return ids, [True] * len(ids)

    def steps(self, messages: Sequence[Any]) -> Steps[tuple[list[int], list[bool]]]:
        """Tokenize torchtune's messages, as `tokenize_messages`."""
        flags = [not message.masked for message in messages]
        ids, trained = yield from self.chat.steps(_plain_messages(messages), flags)
        kept = ids[: self.max_seq_len]
        if len(kept) < len(ids) and ids[-1] == self.eos_id:
            kept[-1] = ids[-1]
        return kept, (~trained[: self.max_seq_len]).tolist()

    def __call__(self, sample: Mapping[str, Any], inference: bool = False) -> dict[str, Any]:
        """Replace a sample's ``messages`` by ``tokens`` and ``mask``, as torchtune's model tokenizers do."""
        rest = {key: value for key, value in sample.items() if key != "messages"}
        tokens, mask = self.tokenize_messages(sample["messages"], inference=inference)
        return {**rest, "tokens": tokens, "mask": mask}

    def _ids(self, text: str, *, special: bool = False) -> list[int]:
        """Tokenize a text without truncation; with the special tokens that the tokenizer adds by itself, or none."""
        require_unicode(text)
        if self._backend is not None:
            ids: list[int] = self._backend.encode(text, add_special_tokens=special).ids
            return ids
        made = self.tokenizer(
            text, add_special_tokens=special, truncation=False, padding=False, verbose=False
        )
        return list(made["input_ids"])


def _plain_messages(messages: Sequence[Any]) -> list[dict[str, Any]]:
    return [
        {"role": TORCHTUNE_ROLES.get(message.role, message.role), "content": message.text_content}
        for message in messages
    ]


def _backend(tokenizer: Any) -> Any:
    """Return the fast tokenizer in one of transformers, with truncation and padding switched off.

    None if there is none, or the tokenizer's class overrides how it is called. Calling it directly takes a fifth less
    time, and starts no threads, about which it would warn after a fork.
    """
    from transformers import PreTrainedTokenizerFast

    kind = type(tokenizer)
    if not isinstance(tokenizer, PreTrainedTokenizerFast) or any(
        getattr(kind, name) is not getattr(PreTrainedTokenizerFast, name)
        for name in ("__call__", "encode", "_encode_plus")
    ):
        return None
    tokenize_in_one_thread_after_forks()
    backend = tokenizer.backend_tokenizer
    backend.no_truncation()
    backend.no_padding()
    backend.encode_special_tokens = tokenizer.split_special_tokens
    return backend


def require_unicode(text: str) -> None:
    """Raise ValueError for half a surrogate pair, which JSON may hold and the tokenizers library calls no str."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"a text has {text[error.start]!r} at character {error.start}, half of a surrogate pair, which is no "
            "Unicode; mend the row, or set skip_bad=True"
        ) from None


def tokenize(tokenizer: Any, texts: Sequence[Text]) -> list[Tokens | Exception]:
    """Tokenize texts, in one call if the tokenizer can; see `HFTokenizer.encode_many`."""
    if isinstance(tokenizer, HFTokenizer):
        made = tokenizer.encode_many(texts)
    else:
        made = [attempt(_encode, tokenizer, text) for text in texts]
    return [
        tokens
        if isinstance(tokens, Exception)
        else tokens._replace(ids=with_one_end(tokenizer, tokens.ids, text))
        for text, tokens in zip(texts, made, strict=True)
    ]


def _encode(tokenizer: Any, text: Text) -> Tokens:
    require_unicode(text.text)
    return Tokens(list(tokenizer.encode(text.text, add_bos=text.add_bos, add_eos=text.add_eos)))


def with_one_end(tokenizer: Any, ids: list[int], text: Text) -> list[int]:
    """Remove a second BOS or EOS, where a text has its own and the tokenizer added one."""
    bos, eos = _id_of(tokenizer, "bos_id"), eos_of(tokenizer)
    if text.text and text.add_bos is not False and bos is not None and ids[:2] == [bos, bos]:
        del ids[0]
    if text.text and text.add_eos and eos is not None and ids[-2:] == [eos, eos]:
        del ids[-1]
    return ids


def eos_of(tokenizer: Any) -> int | None:
    """Return the end-of-text id of a tokenizer, or of an encoder that has an ``eos_id``; None if it has none."""
    return _id_of(tokenizer, "eos_id")


def padding_id(tokenizer: Any) -> int:
    """Return the id to pad with: the tokenizer's, or its EOS, or 0. Padding is never attended and never trained.

    >>> padding_id(object())
    0
    """
    return _id_of(tokenizer, "pad_id", "eos_id") or 0


def _id_of(tokenizer: Any, *names: str) -> int | None:
    found = (getattr(tokenizer, name, None) for name in names)
    return next((i for i in found if type(i) is int and i >= 0), None)
