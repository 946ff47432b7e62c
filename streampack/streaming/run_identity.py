"""The identity of a run: corpus, encoders and settings, which states and ranks are compared by."""

from __future__ import annotations

import copy
from collections.abc import Collection
from functools import cached_property, partial
from typing import Any

from streampack.fingerprint import qualified_name
from streampack.lanes.lane_config import Encode, LaneConfig, encoder_beside, is_giant
from streampack.packing.encoders import TokensEncoder
from streampack.packing.groups import Group
from streampack.packing.media import MediaSample
from streampack.sources.examples import EXAMPLES, UNKNOWN, Example, mark, marks
from streampack.sources.mechanics.corpus_identity import difference, plain_identity
from streampack.sources.source import Source
from streampack.validation import warn_user

OF_READING = ("corpus", "shuffle", "seed")
"""Parts of an identity that decide which rows a lane reads, and in which order."""
OF_FILES = ("files", "hashed", "samples")
"""Entries of a source's identity, and of its encoder's, that follow from its files."""


class RunIdentity:
    """All that decides which tokens share a pack: corpus, encoders, settings. It is computed when first asked for."""

    def __init__(self, config: LaneConfig) -> None:
        self.config = config

    @cached_property
    def parts(self) -> dict[str, Any]:
        """The parts by name: plain values, mappings of them, and functions that read files."""
        config, packing, mix = self.config, self.config.packing, self.config.mix
        if mix is None:
            encoder = encoder_identity(config.encode, config.source, most=config.max_document_tokens)
        else:
            encoder = {
                each.name: encoder_identity(
                    each.encoder or config.encode, each.source, most=config.max_document_tokens
                )
                for each in mix.entries
            }
        return {
            "corpus": config.source.identity(),
            "encoder": encoder,
            "max_seq_len": packing.max_seq_len,
            "split_across_pack": bool(packing.split_across_pack),
            "strategy": packing.strategy,
            "buffer_size": packing.buffer_size,
            "overlong": packing.overlong,
            "max_seqs_per_pack": packing.max_seqs_per_pack,
            "pad_seqs_to": packing.pad_seqs_to,
            # Without images, identities are those of releases that knew none.
            **({} if packing.max_media is None else {"max_media": packing.max_media}),
            "max_document_tokens": config.max_document_tokens,
            "untrained": "drop" if config.untrained == "drop" else "keep",  # "error" drops nothing
            "shuffle": config.shuffle_window or False,
            "seed": config.seed,
        }

    def plain(self, *, listed: bool = False) -> dict[str, Any]:
        """Return the parts as plain values, as a state keeps them; ``listed``: none for which files must be read."""
        found: dict[str, Any] = plain_identity(self.parts, listed=listed)
        return found

    def require(
        self, theirs: Any, *, names: Collection[str] | None = None, changed: Collection[str] = ()
    ) -> None:
        """Compare the identity in a state, by default in all parts.

        Of sources whose files ``changed`` (by their names in a mixture, otherwise an empty one), neither files nor rows
        are compared, so of the encoder only what its ``fingerprint`` returns.
        """
        of_changed = {
            "corpus.names",
            *(f"corpus.{each}/" for each in changed),
            *(f"encoder.{each}" for each in changed),
        }

        def skip(name: str) -> bool:
            if self.config.mix is None:
                return bool(changed) and name.rpartition(".")[2] in OF_FILES
            return bool(changed) and name in of_changed

        ours = {name: part for name, part in self.plain().items() if names is None or name in names}
        if (words := difference(theirs, ours, skip=skip)) is not None:
            raise ValueError(
                f"the state was made {words}; resume with what the run began with, or start a new run"
            )

    def __getstate__(self) -> dict[str, Any]:
        return {"config": self.config}  # each process computes the parts again


def encoder_identity(encode: Encode, source: Source, *, most: int | None = None) -> dict[str, Any]:
    """Return what distinguishes an encoder: its own ``fingerprint``, and marks of what it makes of twelve rows.

    It has no name: a function that was renamed is the same encoder, a closure over another value is not. The rows are
    encoded twice; samples that differ are skipped, with a warning. Giants by ``most`` (`is_giant`) are not encoded.
    """
    own = getattr(encode, "fingerprint", None)
    # If rows are tokens already, the encoder is known by its columns' names, which its fingerprint holds.
    rows = [] if type(encode) is TokensEncoder else source.examples(EXAMPLES)
    samples, again = (marks(rows, partial(_mark, encode, source, most)) for _ in range(2))
    if varying := [name for name in samples if samples[name] != again[name]]:
        warn_user(
            f"the encoder {qualified_name(encode)} makes other tokens of the same row each time (row {varying[0]}): a "
            "resumed run trains other tokens of the rows that waited; draw what is random from the row itself",
        )
    return {
        "fingerprint": None if own is None else str(own()),
        "samples": samples | dict.fromkeys(varying, UNKNOWN),
    }


def _mark(encode: Encode, source: Source, most: int | None, row: Example) -> str:
    """Return a digest of the sample that an encoder makes of a copy of a row; encoders may change rows in place."""
    try:
        if is_giant(encode, row.data, most):
            return UNKNOWN
        made = encoder_beside(encode, source, row.row_id)(copy.deepcopy(row.data))
        if isinstance(made, Group):  # as a tuple, it is its tokens and labels only
            return mark((made, made.lengths, made.parents, made.fields, made.token_fields))
        if isinstance(made, MediaSample):  # not its pixels, whose last bits differ between machines
            return mark((made, made.cost, made.images, made.positions))
        return mark(made)
    except Exception:  # raised when the row is read for training
        return UNKNOWN
