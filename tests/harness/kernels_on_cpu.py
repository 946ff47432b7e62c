"""Kernels of linear attention and state-space models on a CPU: import before transformers' models.

Triton's interpreter runs the kernels of flash-linear-attention and mamba-ssm as they are, very slowly. Those of
causal-conv1d are CUDA; in their place comes a function of torch with the same arguments. The kernel of mamba-ssm that
convolves and scans at once needs it, so layers use the two kernels that it is made of.
"""

from __future__ import annotations

import builtins
import importlib
import importlib.util
import os
import sys
from contextlib import nullcontext
from types import ModuleType, SimpleNamespace
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"

import torch
from triton.runtime import interpreter
from triton.runtime.autotuner import Autotuner

from tests.harness.boundary_kernels import causal_conv1d_fn


class Counter(int):
    """A number of a loop, which the compiler gives a dtype and the interpreter does not."""

    def to(self, _dtype: Any) -> Counter:
        return self


def counted(*bounds: Any) -> Any:
    """Do what ``range`` does."""
    return map(Counter, builtins.range(*map(int, bounds)))


run_grid = interpreter.GridExecutor.__call__


def run_with_counters(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Run a kernel whose loops count with `Counter`."""
    self.fn.__globals__.setdefault("range", counted)
    return run_grid(self, *args, **kwargs)


interpreter.GridExecutor.__call__ = run_with_counters
# mamba-ssm selects the device of its arguments, and divides the work by its size.
torch.cuda.device = lambda _index: nullcontext()
torch.cuda.get_device_properties = lambda _index: SimpleNamespace(multi_processor_count=1)
Autotuner.do_bench = property(
    lambda _self: lambda _call, quantiles: [0.0] * len(quantiles)
)  # no device to tune for


conv: Any = ModuleType("causal_conv1d")
conv.causal_conv1d_fn = causal_conv1d_fn
conv.causal_conv1d_update = None
sys.modules["causal_conv1d"] = conv

if (found := importlib.util.find_spec("mamba_ssm")) is not None:
    package: Any = ModuleType("mamba_ssm")  # without what its __init__.py imports, which needs CUDA
    package.__path__ = found.submodule_search_locations
    sys.modules["mamba_ssm"] = package
    kernels: Any = importlib.import_module("mamba_ssm.ops.triton.ssd_combined")
    kernels.mamba_split_conv1d_scan_combined = lambda *_args, seq_idx=None: None  # layers then do without it
