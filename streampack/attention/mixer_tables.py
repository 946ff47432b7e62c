"""Layers that mix along a row and look at no mask, by the names of their classes: what keeps samples apart in each."""

from __future__ import annotations

from torch import nn

MIXERS = frozenset(
    (
        *("MambaMixer", "Mamba2Mixer", "FalconMambaMixer", "JambaMambaMixer", "ZambaMambaMixer"),
        *("Zamba2MambaMixer", "BambaMixer", "FalconH1Mixer", "NemotronHMamba2Mixer"),
        *("GraniteMoeHybridMambaLayer", "Lfm2ShortConv", "Lfm2MoeShortConv", "RecurrentGemmaRecurrentBlock"),
        *("Qwen3NextGatedDeltaNet", "Qwen3_5GatedDeltaNet", "Qwen3_5MoeGatedDeltaNet"),
        *("OlmoHybridGatedDeltaNet", "KimiLinearDeltaAttention", "MiniMaxLightningAttention"),
        *("RwkvSelfAttention", "RwkvFeedForward", "xLSTMLayer"),
        *(
            "BailingHybridDeltaAttention",
            "Lfm3ShortConv",
            "InklingShortConvolution",
            "Inkling2ShortConvolution",
            "Qwen4ExpTextGatedDeltaNet",
            "Qwen4ExpTextPLELayer",
            "ZayaCCAProjection",
        ),
    )
)
"""Classes of transformers 5.23 that mix along a row and look at no mask. Tests show that each can be split."""

ALIBI = frozenset({"BloomAttention", "FalconAttention", "MptAttention"})
"""Classes of attention whose bias (ALiBi) is given for the keys of a whole row, counted from its first.

In theory attention is the same wherever counting begins, but not when rounded: falcon's bias has 8 bits, and in fp32 a
bias of -4096 leaves a score 12 bits behind the point. One sequence at a time, the bias is that of the sequence alone.
"""

BLOCKS = frozenset({"DeepseekV4Attention", "MiniMaxM3VLAttention"})
"""Classes of attention that put keys into blocks counted from the beginning of a row."""

ALL_OUTPUTS = frozenset({"ZayaCCAProjection"})
"""Mixers of which all outputs have a value for each token, instead of the first only."""

CHUNKED = frozenset({"xLSTMLayer"})
"""Mixers that compute whole chunks of ``config.chunk_size`` tokens at once, and what is left over token by token.

Their sequences are lengthened to whole chunks, which changes no token before and took 0.6 of the time.
"""

TAKES_BOUNDARIES = {
    **dict.fromkeys(("Mamba2Mixer", "BambaMixer", "FalconH1Mixer", "GraniteMoeHybridMambaLayer"), "seq_idx"),
    **dict.fromkeys(
        ("NemotronHMamba2Mixer", "Zamba2MambaMixer", "Lfm2ShortConv", "Lfm2MoeShortConv"), "seq_idx"
    ),
    **dict.fromkeys(("InklingShortConvolution", "Inkling2ShortConvolution"), "seq_idx"),
    **dict.fromkeys(("Qwen3NextGatedDeltaNet", "Qwen3_5GatedDeltaNet"), "cu_seq_lens_q"),
    **dict.fromkeys(("Qwen3_5MoeGatedDeltaNet", "Qwen4ExpTextGatedDeltaNet"), "cu_seq_lens_q"),
    "OlmoHybridGatedDeltaNet": "cu_seq_lens_q",
    **dict.fromkeys(("KimiLinearDeltaAttention", "BailingHybridDeltaAttention"), "cu_seqlens"),
}
"""Mixers that hand boundaries on to their kernels, and the argument that they take beside ``seq_idx``.

``seq_idx`` is for causal-conv1d and mamba-ssm, the others for flash-linear-attention.
"""


def find_mixers(model: nn.Module) -> list[nn.Module]:
    """Return the modules of a model that a table above names. FSDP2 makes subclasses, so base classes count."""
    return [
        module
        for module in model.modules()
        if names_of(module) & (MIXERS | BLOCKS | (ALIBI if _has_alibi(module) else set()))
    ]


def names_of(module: nn.Module) -> set[str]:
    """Return the names of a module's class and its base classes."""
    return {cls.__name__ for cls in type(module).__mro__}


def _has_alibi(module: nn.Module) -> bool:
    """Return whether an attention module of `ALIBI` has a bias: falcon's rotates its queries instead by default."""
    return "FalconAttention" not in names_of(module) or bool(module.config.alibi)  # type: ignore[union-attr]
