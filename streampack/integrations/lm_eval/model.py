"""The model class ``streampack`` of lm-evaluation-harness: its class ``hf``, with log-likelihoods from packs."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM

from streampack.attention import prepare_model_for_packing
from streampack.scoring.score import score
from streampack.validation import require_positive

DEFAULT_MAX_SEQ_LEN = 8192
"""Tokens of a pack, unless the model has fewer positions."""

Request = tuple[
    tuple[str, str] | None, list[int], list[int]
]  # texts, ids of the context and of the continuation


@register_model("streampack")
class PackedLM(HFLM):  # type: ignore[misc]
    """A causal language model of Hugging Face, evaluated in packs.

    Texts, tokens, truncation and results are those of the harness's class ``hf``, and so are its arguments, but for
    ``backend="seq2seq"``, and a ``softmax_dtype`` other than ``float32``, in which all probabilities are computed.
    Requests for log-likelihoods are packed as they fit, whatever ``batch_size`` is. Text is generated from padded
    batches, as by ``hf``.

    Args:
        pretrained: a name or path of a model, or a model.
        max_seq_len: of a pack, in tokens; a longer request has a pack for itself. None: 8192, or the
            model's number of positions if that is smaller.
        attention: see `prepare_model_for_packing`.
        share_prefix: whether a beginning that requests share, such as examples and the question, is computed once.
        kwargs: of the class ``hf``.

    Raises:
        ValueError: for a model that cannot be packed, or arguments that do not fit.
    """

    batch_size_per_gpu: int | str

    def __init__(
        self,
        pretrained: Any,
        *,
        max_seq_len: int | None = None,
        attention: str = "auto",
        share_prefix: bool = True,
        **kwargs: Any,
    ) -> None:
        super().__init__(pretrained, **kwargs)
        if self.backend != "causal":
            raise ValueError(f"backend={self.backend!r} cannot be packed; use --model hf")
        if self.softmax_dtype not in (None, torch.float32):
            raise ValueError(
                f"softmax_dtype={self.softmax_dtype} is not computed here, only torch.float32; leave it out, or use "
                "--model hf"
            )
        try:
            self.inputs = prepare_model_for_packing(self.model, attention=attention)
        except ValueError as error:
            raise ValueError(f"{error}; or evaluate it with --model hf") from None
        if max_seq_len is None:
            max_seq_len = self._default_max_seq_len()
        self.max_seq_len = require_positive(max_seq_len, "max_seq_len")
        self.inputs.require_length(self.max_seq_len)
        self.share_prefix = share_prefix

    def _default_max_seq_len(self) -> int:
        try:
            self.inputs.require_length(DEFAULT_MAX_SEQ_LEN)
        except ValueError:
            return int(self.max_length)
        return DEFAULT_MAX_SEQ_LEN

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """Return the log-likelihood of each text.

        The windows of all texts are scored at once: in batches of ``batch_size`` they would not fill packs.
        """
        batch_size, self.batch_size_per_gpu = self.batch_size_per_gpu, sys.maxsize
        try:
            found: list[float] = super().loglikelihood_rolling(requests, disable_tqdm=disable_tqdm)
        finally:
            self.batch_size_per_gpu = batch_size
        return found

    def _loglikelihood_tokens(
        self, requests: Sequence[Request], disable_tqdm: bool = False, override_bs: int | None = None
    ) -> list[tuple[float, bool]]:
        """Return for each request the log-likelihood of its continuation, and whether the model prefers it greedily.

        A request with more than ``max_length`` tokens before the last one loses its beginning, as in ``hf``.
        """
        pairs = []
        for _, context, continuation in requests:
            kept = (context + continuation)[-(self.max_length + 1) :]
            assert len(kept) > len(continuation) > 0, "the harness makes no other requests"
            pairs.append((kept[: -len(continuation)], continuation))
        longest = max((len(context) + len(continuation) - 1 for context, continuation in pairs), default=1)
        answers = []
        with self._autocast():
            scores = score(
                self.model,
                pairs,
                max_seq_len=max(self.max_seq_len, longest),
                inputs=self.inputs,
                share_prefix=self.share_prefix,
                across_ranks=False,  # the harness has divided the requests among them
                progress=not disable_tqdm and self.rank == 0,
            )
            for (texts, _, _), found in zip(requests, scores, strict=True):
                answers.append((found.logp, found.greedy))
                if texts is not None:  # windows of a longer text have none
                    self.cache_hook.add_partial("loglikelihood", texts, answers[-1])
        return answers

    def _autocast(self) -> torch.autocast:
        """Return the context of ``mixed_precision_dtype``, as ``hf`` has it."""
        dtype = self.mixed_precision_dtype
        return torch.autocast(self.device.type, dtype=dtype, enabled=dtype is not None)
