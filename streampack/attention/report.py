"""The report of the leak probe."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["sample", "padding", "alone", "image"]

# Likely causes. "backward", "neighbour" and "all" are cases of the kind "sample".
CAUSES = {
    "backward": "a token sees what comes after it: attention is not causal, or samples share statistics",
    "neighbour": (
        "only neighbours see one another: a boundary is off by a token, or a sequence does not begin at position 0"
    ),
    "all": (
        "attention runs over the ends of samples: no mask arrives (with a cache, use_cache, or with an attention_mask, "
        "transformers ignores position_ids), or layers carry a state from token to token (mamba, linear attention, "
        "convolutions)"
    ),
    "image": (
        "images are not where their tokens are: rows of pixels are shifted, a grid is missing or in another order, or "
        "the tower attends over the ends of images"
    ),
    "padding": "real tokens see the padding, or its logits are not numbers",
    "alone": (
        "nothing leaks, but samples are not what they are by themselves: positions do not restart, or the mask lacks "
        "the model's sliding window"
    ),
}
WAY_OUT = (
    "way out: inputs = prepare_model_for_packing(model), then model(**inputs(batch)); if you do that, try another "
    "attention; if none will do, train on padded batches, one sample a row"
)


@dataclass(frozen=True)
class Leak:
    """A sample whose logits moved although they must not."""

    kind: Kind
    sample: int  # index in the pack of the sample whose logits moved
    # The norm of the change, divided by the mean norm of the pack's logits: of the token that moved farthest, or for
    # kind "alone" the mean over the sample's tokens. In training mode, the norm of gradients, see `find_leaks`.
    moved: float
    source: int | None = None  # index of the sample that was changed, for kinds "sample" and "image"
    training: bool = False

    def __str__(self) -> str:
        """Describe the leak in one line."""
        if self.training:
            return f"in training mode, sample {self.sample} has gradients at other tokens, {self.moved:.1g} of its own"
        cause = {
            "image": f"changing the images of sample {self.source} moved sample {self.sample}",
            "sample": f"changing sample {self.source} moved sample {self.sample}",
            "padding": f"changing the padding moved sample {self.sample}",
            "alone": f"sample {self.sample} differs from itself alone",
        }[self.kind]
        return f"{cause} by {self.moved:.1g}"


@dataclass(frozen=True)
class LeakReport:
    """The result of `find_leaks`; ``print`` it."""

    lengths: tuple[int, ...]  # tokens of each sample of the pack
    leaks: tuple[Leak, ...]
    limit: float  # a change above it is a leak
    worst: float  # the largest change of logits, whether it is a leak or not
    # Whether tokens did not change even the logits of later tokens of their own sample; then leaks could not show.
    blind: bool = False

    @property
    def ok(self) -> bool:
        """Whether there is no leak."""
        return not self.leaks

    @property
    def cause(self) -> str | None:
        """The likely cause, or None without a leak."""
        kinds = {leak.kind for leak in self.leaks}
        if not kinds:
            return None
        if "sample" in kinds:
            distances = {leak.sample - leak.source for leak in self.leaks if leak.source is not None}
            backward = min(distances, default=0) < 0
            return CAUSES["backward" if backward else "neighbour" if distances == {1} else "all"]
        return CAUSES[next(kind for kind in ("image", "padding", "alone") if kind in kinds)]

    def __str__(self) -> str:
        """List the leaks, the likely cause and the way out."""
        lengths = ", ".join(map(str, self.lengths))
        pack = f"a pack of {len(self.lengths)} samples ({lengths} tokens)"
        if self.ok:
            caveat = (
                "; but tokens do not see those of their own sample either (weights that begin at zero?), so ask again "
                "after some steps"
            )
            text = f"no leak in {pack}; logits moved by {self.worst:.1g} at most, and may by {self.limit:g}"
            return text + caveat * self.blind
        count = f"{len(self.leaks)} leak{'s' if len(self.leaks) > 1 else ''}"
        lines = [f"{count} in {pack}, where logits may move by {self.limit:g}:"]
        lines += [f"  {leak}" for leak in self.leaks]
        return "\n".join([*lines, f"likely cause: {self.cause}", WAY_OUT])
