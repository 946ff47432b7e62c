"""flash-attn does not run on a CPU: stand-ins have the signatures of its three generations.

The signatures are from github.com/Dao-AILab/flash-attention: flash_attn/flash_attn_interface.py (2),
hopper/flash_attn_interface.py (3) and flash_attn/cute/interface.py (4). The stand-ins compute varlen attention.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import nullcontext
from types import ModuleType
from typing import Any

import pytest
import torch

# private: without a GPU, no prepared model calls flash-attn
from streampack.attention import flash, varlen_attention
from streampack.attention.flash import find_flash, flash_attention
from tests.oracle.attention import tensors

CUDA = torch.device("cuda")
CUTS = torch.tensor([0, 7, 7, 20], dtype=torch.int32)
NAMES = {2: "flash_attn", 3: "flash_attn_interface", 4: "flash_attn.cute"}
QKV = ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
PARAMETERS = {
    2: (*QKV, "dropout_p", "softmax_scale", "causal", "window_size", "softcap", "alibi_slopes", "deterministic",
        "return_attn_probs", "block_table"),
    3: (*QKV, "seqused_q", "seqused_k", "softmax_scale", "causal", "qv", "q_descale", "k_descale", "v_descale",
        "window_size", "attention_chunk", "softcap", "num_splits", "pack_gqa", "deterministic", "sm_margin",
        "return_attn_probs"),
    4: (*QKV, "seqused_q", "seqused_k", "page_table", "softmax_scale", "causal", "window_size", "learnable_sink",
        "softcap", "num_splits", "pack_gqa", "deterministic", "score_mod", "mask_mod", "block_sparse_tensors",
        "cu_total_m_blocks", "cu_total_n_blocks", "aux_tensors", "return_lse"),
}  # fmt: skip


def stand_in(generation: int) -> Callable[..., Any]:
    """Return varlen attention with the parameters of a generation; 4 calls no limit None, and returns a tuple."""

    def compute(*args: Any, **given: Any) -> Any:
        given |= zip(PARAMETERS[generation], args, strict=False)
        assert given.keys() <= set(PARAMETERS[generation])
        before, behind = given["window_size"]
        assert given["causal"]
        assert behind == 0
        assert torch.equal(given["cu_seqlens_q"], given["cu_seqlens_k"])
        assert given["max_seqlen_q"] == given["max_seqlen_k"]
        out = varlen_attention(
            *(given[name] for name in "qkv"),
            cu_seqlens=given["cu_seqlens_q"],
            max_seqlen=given["max_seqlen_q"],
            window=None if before == (None if generation == 4 else -1) else before + 1,
            scale=given["softmax_scale"],
            softcap=given["softcap"] or None,
        )
        return (out, None) if generation == 4 else out

    return compute


def install(patch: pytest.MonkeyPatch, *generations: int, gpu: tuple[int, int] = (9, 0)) -> None:
    """Pretend that this GPU and these generations of flash-attn are installed."""
    patch.setattr(torch.cuda, "get_device_capability", lambda device=None: gpu)
    patch.setattr(flash, "_chosen", None)
    parent = ModuleType("flash_attn")  # also the folder of 4, so that it is there without 2
    parent.__path__ = []
    modules: dict[str, ModuleType | None] = dict.fromkeys(NAMES.values())  # None: cannot be imported
    for generation in generations:
        module = parent if generation == 2 else ModuleType(NAMES[generation])
        module.__dict__["flash_attn_varlen_func"] = stand_in(generation)
        modules[NAMES[generation]] = module
    if {2, 4} & set(generations):
        modules["flash_attn"] = parent
    for name, entry in modules.items():
        patch.setitem(sys.modules, name, entry)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("gpu", "installed", "chosen"),
    [
        ((8, 0), (2, 3, 4), 3),
        ((8, 9), (2, 4), 2),
        ((9, 0), (2, 3, 4), 3),
        ((9, 0), (2, 4), 4),
        ((10, 0), (2, 3, 4), 4),
        ((9, 0), (), None),
        ((10, 0), (3,), None),
    ],
)
def test_the_generation_depends_on_the_gpu(
    gpu: tuple[int, int], installed: tuple[int, ...], chosen: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, *installed, gpu=gpu)
    message = r'pip install "streampack\[flash\]"(?s:.*)use attention=\'varlen\', the default'
    with nullcontext() if chosen else pytest.raises(ImportError, match=message):
        assert find_flash(CUDA)[0] == chosen


def test_other_devices_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="needs CUDA, the model is on cpu; use attention='varlen'"):
        find_flash(torch.device("cpu"))
    install(monkeypatch, 2, gpu=(7, 5))
    with pytest.raises(ValueError, match="needs a GPU of compute capability 8.0 or more, this one has 7.5"):
        find_flash(CUDA)


@pytest.mark.parametrize("generation", NAMES)
@pytest.mark.parametrize(("window", "scale"), [(None, None), (1, 0.7), (4, None)])
def test_calls_have_the_published_signature(
    generation: int, window: int | None, scale: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, generation)
    assert find_flash(CUDA)[0] == generation
    q, k, v, _ = tensors(20, heads=4, kv_heads=2, dtype=torch.bfloat16)
    softcap = None if generation == 4 else 5.0
    settings: dict[str, Any] = {"max_seqlen": 13, "window": window, "scale": scale, "softcap": softcap}
    ours = flash_attention(q, k, v, cu_seqlens=CUTS, **settings)
    assert torch.equal(ours, varlen_attention(q, k, v, cu_seqlens=CUTS, **settings))


@pytest.mark.parametrize(
    ("generation", "dtype", "softcap", "why"),
    [
        (2, torch.float32, None, "flash-attn computes in 16 bits and the model is in torch.float32"),
        (4, torch.bfloat16, 50.0, "flash-attn 4 has no softcap to train with and the model has one of 50.0"),
    ],
)
def test_limits_of_the_generations(
    generation: int, dtype: torch.dtype, softcap: Any, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, generation)
    assert find_flash(CUDA)[0] == generation
    q, k, v, _ = tensors(20, heads=4, kv_heads=2, dtype=dtype)
    with pytest.raises(ValueError, match=f"attention='flash': {why}; use attention='flex' or 'dense'"):
        flash_attention(q, k, v, cu_seqlens=CUTS, max_seqlen=13, softcap=softcap)
