"""Build a torchtune model with its weights, whole or sharded over the ranks; gather and clip it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torchtune import modules, training
from torchtune.modules import peft

from streampack.instantiate import COMPONENT, build
from streampack.training.config import RunConfig
from streampack.training.world import World

# torchtune copies the logits to fp32. In this many chunks, each copy is freed before the next is made.
OUTPUT_CHUNKS = 8

Weights = Mapping[str, Any]


def build_model(
    config: RunConfig, *, weights: Weights, device: torch.device, world: World, adapters_only: bool = False
) -> nn.Module:
    """Build the model that a config names, load its weights, and return it on ``device`` in training mode.

    With several ranks it is sharded by FSDP2, layer by layer: each rank holds a part of the weights, gradients and
    optimizer states, and gathers a whole layer only while it computes with it. Then this function is a collective.
    ``weights`` have the names that the unsharded model has; ``adapters_only`` freezes all but the adapters.
    """
    try:
        torch_dtype = training.get_dtype(config.dtype, device=device)
    except RuntimeError as error:  # torchtune raises it if the GPU does not compute in bf16
        raise ValueError(f"dtype={config.dtype} on {device}: {error}") from error
    with training.set_default_dtype(torch_dtype), torch.device("meta") if world.size > 1 else device:
        model: nn.Module = build(config.model)
    if hasattr(model, "set_num_output_chunks"):
        model.set_num_output_chunks(OUTPUT_CHUNKS)  # type: ignore[operator]
    if adapters_only:
        weights = {**weights, **start_adapters(model, seed=config.seed or 0)}
    if config.compile:
        training.compile_model(model, verbose=False)
    if config.enable_activation_checkpointing:
        training.set_activation_checkpointing(model, auto_wrap_policy={modules.TransformerSelfAttentionLayer})
    if world.size > 1:
        try:
            training.shard_model(
                model,
                [partial(training.get_shard_conditions, names_to_match=config.custom_sharded_layers)],
                cpu_offload=False,
                reshard_after_forward=config.fsdp_reshard_after_forward,
                dp_mesh=init_device_mesh(device.type, (world.size,)),
            )
        except AssertionError as error:
            # torchao raises it: a rank needs whole groups of 64 * 256 quantized numbers.
            raise ValueError(
                f"the model cannot be sharded over {world.size} ranks: {error}; use a number of ranks that "
                "divides its quantized weights (powers of 2 usually do), or do not quantize"
            ) from error
        with training.set_default_dtype(torch_dtype), device:
            for module in model.modules():
                if hasattr(module, "rope_init"):  # computes a buffer that is in no checkpoint
                    module.rope_init()  # type: ignore[operator]
    try:
        if world.size > 1:
            training.load_from_full_model_state_dict(model, weights, device, strict=True)
        else:
            model.load_state_dict(weights)
    except (RuntimeError, AttributeError) as error:
        raise _unfit_weights(model, weights) or error from error
    training.validate_no_params_on_meta_device(model)
    training.validate_expected_param_dtype(model.named_parameters(), dtype=torch_dtype)
    for module in model.modules():
        if hasattr(module, "initialize_dora_magnitude"):  # needs the norms of the base weights
            module.initialize_dora_magnitude()  # type: ignore[operator]
    return model.train()


def start_adapters(model: nn.Module, *, seed: int) -> dict[str, torch.Tensor]:
    """Freeze all but the adapters of a model, and return the adapters' initial weights.

    As in LoRA's paper, A is random and B is zero, so that the model computes at first what its base computes. The
    values depend on ``seed`` alone, not on the number of ranks or the device.
    """
    adapters = peft.get_adapter_params(model)
    for name, layer in model.named_modules():
        if isinstance(layer, peft.DoRALinear) and getattr(layer, "bias", None) is not None:
            raise ValueError(
                f"{name} has a bias, which DoRA scales in torchtune, and neither when its weights are merged nor in "
                "PEFT; set use_dora to False"
            )
    peft.set_trainable_params(model, adapters)
    generator = torch.Generator().manual_seed(seed)
    weights = {name: torch.zeros(value.shape, dtype=value.dtype) for name, value in adapters.items()}
    for name, value in weights.items():
        if name.endswith("lora_a.weight"):
            nn.init.kaiming_uniform_(value, a=math.sqrt(5), generator=generator)
    return weights


def find_adapters(config: RunConfig, *, wanted: bool | None = None) -> bool:
    """Return whether the model that a config names has adapters, without its weights.

    ``wanted``: whether the recipe trains adapters, or all weights; None: either. Another model is refused.
    """
    with torch.device("meta"):
        found = bool(peft.get_adapter_params(build(config.model)))
    if wanted is not None and wanted != found:
        name = config.model[COMPONENT]
        raise ValueError(
            f"model: {name} has no adapters to train; name one of torchtune's lora_ or qlora_ models, or run "
            "full_finetune"
            if wanted
            else f"model: {name} has adapters, and this recipe trains all weights; run lora_finetune, or name a "
            "builder without adapters"
        )
    return found


def _unfit_weights(model: nn.Module, weights: Weights) -> ValueError | None:
    """Return an error that names the first weights that do not fit a model; None if they all do.

    torch lists every weight that does not fit, or raises an AttributeError that names none.
    """
    wanted = {
        name.replace("_checkpoint_wrapped_module.", "").replace("_orig_mod.", ""): tuple(value.shape)
        for name, value in model.named_parameters()
    }
    given = {name: tuple(value.shape) for name, value in weights.items()}
    found = [
        f"size mismatch for {name}, {given[name]} in the checkpoint and {shape} in the model"
        for name, shape in wanted.items()
        if given.get(name, shape) != shape
    ]
    found += [f"{name} is missing in the checkpoint" for name in wanted if name not in given]
    found += [f"{name} is not in the model" for name in given if name not in wanted]
    more = f"; and {len(found) - 3} more" if len(found) > 3 else ""
    if not found:
        return None
    return ValueError(
        f"the checkpointer's weights do not fit the model: {'; '.join(found[:3])}{more}; name the model that the "
        "checkpoint is of"
    )


def full_weights(model: nn.Module, *, device: torch.device, world: World) -> dict[str, torch.Tensor]:
    """Gather all weights on the CPU of rank 0, under the names they were loaded by; a collective.

    Empty on the other ranks.
    """
    if world.size > 1:
        weights: dict[str, torch.Tensor] = training.gather_cpu_state_dict(model, world.is_main, device=device)
        return weights
    return {name: value.cpu() for name, value in model.state_dict().items()}


def clip_gradients(model: nn.Module, max_norm: float) -> torch.Tensor:
    """Scale the gradients so that their norm over all shards is at most ``max_norm``; return the norm before."""
    norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm=max_norm)
    return norm.full_tensor() if hasattr(norm, "full_tensor") else norm


def seed_step(seed: int, step: int, rank: int = 0) -> None:
    """Seed torch's generators (dropout) by (seed, step, rank), so that a checkpoint need not store their state."""
    torch.manual_seed(hash((seed, step, rank)) & (2**63 - 1))
