"""Training with the rounding of a later quantization (QAT): torchtune's quantizers."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import nn
from torchao.quantization.qat import FakeQuantizeConfig
from torchao.quantization.qat.fake_quantizer import FakeQuantizerBase
from torchtune import training
from torchtune.modules import peft
from torchtune.training.quantization import swap_lora_linear_with_qat

from streampack.training.config import RunConfig


def quantize_in_training(model: nn.Module, quantizer: Any, *, dtype: torch.dtype) -> None:
    """Make a model's layers round their numbers as after quantization, in place (QAT); of LoRA, the frozen bases."""
    if "qat" not in str(training.get_quantizer_mode(quantizer)):
        raise ValueError(
            f"quantizer: {type(quantizer).__name__} quantizes weights after training; name one of torchtune's for "
            "training, such as torchtune.training.quantization.Int8DynActInt4WeightQATQuantizer"
        )
    quantizer.precision = dtype
    adapted = [each for each in model.modules() if isinstance(each, peft.LoRALinear | peft.DoRALinear)]
    for each in adapted:
        # torchtune's QATLoRALinear drops a bias, and makes plain weights of quantized ones.
        if isinstance(each, peft.DoRALinear) or each.bias is not None or each._quantize_base:
            raise ValueError(
                "quantizer: torchtune trains no DoRA, biased or quantized layers with rounding; choose another model, "
                "or remove the key"
            )
    if adapted:
        rounding = (
            quantizer.get_activation_fake_quantize_config(),
            quantizer.get_weight_fake_quantize_config(),
        )
        # torchtune asks for torchao's older class, which takes the same arguments and warns that it is old.
        with warnings.catch_warnings(action="ignore"):
            swap_lora_linear_with_qat(
                model, *(each and FakeQuantizeConfig(**vars(each)) for each in rounding)
            )
    else:
        quantizer.prepare(model)
    if not any(isinstance(each, FakeQuantizerBase) for each in model.modules()):
        raise ValueError(
            f"quantizer: groupsize={quantizer.groupsize} divides the input size of no layer of the model, and nothing "
            "would be rounded; choose a smaller one"
        )


def delay_fake_quant(model: nn.Module, config: RunConfig, *, step: int) -> None:
    """Set whether a model that a quantizer prepared rounds its numbers in a step, counted from 0 (QAT)."""
    if config.fake_quant_after_n_steps is not None:
        for module in model.modules():
            if isinstance(module, FakeQuantizerBase):
                module.enabled = step >= config.fake_quant_after_n_steps
