"""flash-attn does not run on a CPU: stand-ins have the signatures of its three generations. And kernels on CUDA.

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
from tests.oracle.attention import LIMIT, difference, tensors

CUDA = torch.device("cuda")
CUTS = torch.tensor([0, 7, 7, 20], dtype=torch.int32)
Sees = tuple[int | None, int | None]


def second(
    q: Any, k: Any, v: Any, cu_seqlens_q: Any, cu_seqlens_k: Any, max_seqlen_q: int, max_seqlen_k: int,
    dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False, window_size: Sees = (-1, -1),
    softcap: float = 0.0, alibi_slopes: Any = None, deterministic: bool = False, return_attn_probs: bool = False,
    block_table: Any = None,
) -> torch.Tensor:  # fmt: skip
    return compute(locals(), unlimited=-1)


def third(
    q: Any, k: Any, v: Any, cu_seqlens_q: Any, cu_seqlens_k: Any, max_seqlen_q: int, max_seqlen_k: int,
    seqused_q: Any = None, seqused_k: Any = None, softmax_scale: float | None = None, causal: bool = False,
    qv: Any = None, q_descale: Any = None, k_descale: Any = None, v_descale: Any = None, window_size: Sees = (-1, -1),
    attention_chunk: int = 0, softcap: float = 0.0, num_splits: int = 1, pack_gqa: bool | None = None,
    deterministic: bool = False, sm_margin: int = 0, return_attn_probs: bool = False,
) -> torch.Tensor:  # fmt: skip
    return compute(locals(), unlimited=-1)


def fourth(
    q: Any, k: Any, v: Any, cu_seqlens_q: Any = None, cu_seqlens_k: Any = None, max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None, seqused_q: Any = None, seqused_k: Any = None, page_table: Any = None,
    softmax_scale: float | None = None, causal: bool = False, window_size: Sees = (None, None),
    learnable_sink: Any = None, softcap: float = 0.0, num_splits: int = 1, pack_gqa: bool | None = None,
    deterministic: bool = False, score_mod: Any = None, mask_mod: Any = None, block_sparse_tensors: Any = None,
    cu_total_m_blocks: Any = None, cu_total_n_blocks: Any = None, aux_tensors: Any = None, return_lse: bool = False,
) -> tuple[torch.Tensor, None]:  # fmt: skip
    return compute(locals(), unlimited=None), None


def compute(given: dict[str, Any], *, unlimited: int | None) -> torch.Tensor:
    before, behind = given["window_size"]
    assert given["causal"]
    assert behind == 0
    assert torch.equal(given["cu_seqlens_q"], given["cu_seqlens_k"])
    assert given["max_seqlen_q"] == given["max_seqlen_k"]
    return varlen_attention(
        *(given[name] for name in "qkv"),
        cu_seqlens=given["cu_seqlens_q"],
        max_seqlen=given["max_seqlen_q"],
        window=None if before == unlimited else before + 1,
        scale=given["softmax_scale"],
        softcap=given["softcap"] or None,
    )


NAMES = {2: "flash_attn", 3: "flash_attn_interface", 4: "flash_attn.cute"}
STANDS_IN: dict[int, Callable[..., Any]] = {2: second, 3: third, 4: fourth}


def install(patch: pytest.MonkeyPatch, *generations: int, gpu: tuple[int, int] = (9, 0)) -> None:
    """Pretend that this GPU and these generations of flash-attn are installed."""
    patch.setattr(torch.cuda, "get_device_capability", lambda device=None: gpu)
    patch.setattr(flash, "_chosen", None)
    parent = ModuleType("flash_attn")  # also the folder of 4, so that it is there without 2
    parent.__path__ = []
    modules: dict[str, ModuleType | None] = dict.fromkeys(NAMES.values())  # None: cannot be imported
    for generation in generations:
        module = parent if generation == 2 else ModuleType(NAMES[generation])
        module.__dict__["flash_attn_varlen_func"] = STANDS_IN[generation]
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
        ((9, 0), (2,), 2),
        ((10, 0), (2, 3, 4), 4),
        ((12, 0), (2, 3), 2),
        ((9, 0), (), None),
        ((10, 0), (3,), None),
        ((8, 0), (4,), None),
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


@pytest.mark.gpu
@pytest.mark.parametrize("attend", [varlen_attention, flash_attention])
@pytest.mark.parametrize("window", [None, 1, 5, 100])
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (6, 1)])
@pytest.mark.parametrize("scale", [None, 0.7])
def test_a_kernel_on_cuda_equals_the_cpu_loop(
    attend: Any, heads: tuple[int, int], window: int | None, scale: float | None
) -> None:
    """The CPU gets the same 16-bit inputs and accumulates in 32 bits, as the kernels do."""
    if attend is flash_attention:
        try:
            find_flash(CUDA)
        except ImportError as error:
            pytest.skip(str(error))
    cuts = torch.tensor([0, 0, 37, 38, 64, 64, 200], dtype=torch.int32)
    results = []
    for compute, device in [(varlen_attention, "cpu"), (attend, "cuda")]:
        sizes: dict[str, Any] = {"heads": heads[0], "kv_heads": heads[1], "dtype": torch.bfloat16}
        q, k, v, upstream = tensors(200, **sizes, device=device)
        out = compute(q, k, v, cu_seqlens=cuts.to(device), max_seqlen=136, window=window, scale=scale)
        results.append([x.detach().cpu() for x in (out, *torch.autograd.grad(out, (q, k, v), upstream))])
    for ours, theirs in zip(*results, strict=True):
        assert difference(ours.double(), theirs.double()) < LIMIT[torch.bfloat16] or window == 1
