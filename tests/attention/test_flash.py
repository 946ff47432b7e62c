"""flash-attn does not run on a CPU: stand-ins take the place of its function and of torch's switch.

Calls are compared with the arguments of ``flash_attn_varlen_func``, as its sources have them.
"""

from __future__ import annotations

import sys
from contextlib import nullcontext
from types import ModuleType
from typing import Any

import pytest
import torch

# private: without a GPU, no prepared model calls flash-attn
from streampack.attention import backends, varlen_attention
from streampack.attention.backends import choose_flash, flash_attention, why_not_backend
from tests.oracle.attention import tensors

CUDA = torch.device("cuda")
CUTS = torch.tensor([0, 7, 7, 20], dtype=torch.int32)
# From github.com/Dao-AILab/flash-attention, August 2026, without the arguments that only inference has.
SIGNATURES = {
    # flash_attn/flash_attn_interface.py
    2: """q k v cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k dropout_p softmax_scale causal window_size softcap
        alibi_slopes deterministic return_attn_probs block_table""",
    # hopper/flash_attn_interface.py
    3: """q k v cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k seqused_q seqused_k softmax_scale causal qv
        q_descale k_descale v_descale window_size attention_chunk softcap num_splits pack_gqa deterministic sm_margin
        return_attn_probs""",
    # flash_attn/cute/interface.py; here an infinite window is None, so torch calls it, and not this package
    4: """q k v qv cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k min_seqlen_k seqused_q seqused_k
        gather_kv_indices page_table softmax_scale causal window_size learnable_sink softcap num_splits pack_gqa
        deterministic score_mod mask_mod return_lse""",
}


def generation_2(*args: Any, **given: Any) -> torch.Tensor:
    """Compute varlen attention; by position, only what all generations have there."""
    for names in SIGNATURES.values():
        assert given.keys() <= {*names.split()} - {*names.split()[: len(args)]}
    given |= zip(("q", "k", "v"), args, strict=True)
    assert given["v"].shape == given["k"].shape, "it has one number of channels for both"
    before, behind = given["window_size"]
    assert given["causal"]
    assert behind == 0
    assert given["max_seqlen_q"] == given["max_seqlen_k"]
    return varlen_attention(
        *(given[name] for name in "qkv"),
        cu_seqlens=given["cu_seqlens_q"],
        cu_seqlens_k=given["cu_seqlens_k"],
        max_seqlen=given["max_seqlen_q"],
        window=None if before < 0 else before + 1,
        scale=given["softmax_scale"],
        softcap=given["softcap"] or None,
    )


def install(patch: pytest.MonkeyPatch, *names: str, gpu: tuple[int, int] = (9, 0)) -> list[str]:
    """Pretend that this GPU and these implementations are installed; return the list of what is switched on."""
    switched: list[str] = []

    def activate(name: str) -> None:
        if name not in names:
            raise ModuleNotFoundError(name)
        switched.append(name)

    module = ModuleType("flash_attn")
    module.__dict__["flash_attn_varlen_func"] = generation_2
    patch.setattr(torch.cuda, "get_device_capability", lambda device=None: gpu)
    patch.setattr(backends, "_flash2", None)
    patch.setattr(backends, "activate_flash_attention_impl", activate)
    patch.setitem(sys.modules, "flash_attn", module if "FA2" in names else None)  # type: ignore[arg-type]
    return switched


@pytest.mark.parametrize(
    ("gpu", "installed", "softcap", "chosen"),
    [
        ((8, 0), ("FA2", "FA3", "FA4"), None, "FA2"),  # torch's switch for 3 needs a Hopper
        ((9, 0), ("FA2", "FA3", "FA4"), None, "FA3"),
        ((9, 0), ("FA2", "FA4"), None, "FA4"),
        ((9, 0), ("FA2", "FA3", "FA4"), 50.0, "FA2"),  # the only one with a softcap
        ((10, 0), ("FA2", "FA3", "FA4"), None, "FA4"),
        ((12, 0), ("FA2", "FA4"), None, "FA2"),  # generation 4 is for data centres' Blackwell
        ((9, 0), (), None, None),
        ((10, 0), ("FA3",), None, None),
        ((9, 0), ("FA3",), 50.0, None),
    ],
)
def test_the_implementation_depends_on_the_gpu_and_the_model(
    gpu: tuple[int, int],
    installed: tuple[str, ...],
    softcap: float | None,
    chosen: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    switched = install(monkeypatch, *installed, gpu=gpu)
    message = r'pip install "streampack\[flash\]"(?s:.*)use attention=\'varlen\', the default'
    with nullcontext() if chosen else pytest.raises(ImportError, match=message):
        assert choose_flash(CUDA, softcap=softcap) == chosen
    assert switched == [chosen] * (chosen in ("FA3", "FA4"))


def test_other_devices_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="needs CUDA, the model is on cpu; use attention='varlen'"):
        choose_flash(torch.device("cpu"))
    install(monkeypatch, "FA2", gpu=(7, 5))
    with pytest.raises(ValueError, match="needs a GPU of compute capability 8.0 or more, this one has 7.5"):
        choose_flash(CUDA)


@pytest.mark.parametrize("name", ["FA2", "FA3"])
@pytest.mark.parametrize(("window", "scale", "channels"), [(None, None, 8), (1, 0.7, 8), (4, None, 4)])
def test_it_computes_what_varlen_attention_computes(
    name: str, window: int | None, scale: float | None, channels: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With more keys than queries, and with values of fewer channels, too."""
    install(monkeypatch, name)
    assert choose_flash(CUDA) == name
    q, k, v, _ = tensors(20, heads=4, kv_heads=2, dtype=torch.bfloat16)
    v = v[..., :channels]
    settings: dict[str, Any] = {"max_seqlen": 13, "window": window, "scale": scale}
    for ends, key_ends in ((CUTS, None), (torch.tensor([0, 3, 8], dtype=torch.int32), CUTS[[0, 1, 3]])):
        queries = q[: int(ends[-1])]
        settings |= {"cu_seqlens": ends, "cu_seqlens_k": key_ends}
        ours = flash_attention(queries, k, v, **settings)
        assert torch.equal(ours, varlen_attention(queries, k, v, **settings))


def test_what_it_cannot_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, "FA2")
    good: dict[str, Any] = {"device": CUDA, "dtype": torch.bfloat16, "head_dim": 128, "softcap": 50.0}
    assert why_not_backend("flash", **good) is None
    why = "flash attention computes in 16 bits and the model computes in torch.float32"
    assert why_not_backend("flash", **good | {"dtype": torch.float32}) == why
    assert "at most 256" in str(why_not_backend("flash", **good | {"head_dim": 264}))
