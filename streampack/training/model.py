"""Build a torchtune model with its weights, sharded over the ranks, with what saves memory; gather its weights."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor.parallel import parallelize_module
from torchtune import modules, training
from torchtune.modules import common_utils, peft

from streampack.instantiate import build, errors_of
from streampack.training.config import RunConfig
from streampack.training.quantization import quantize_in_training
from streampack.training.world import World

# torchtune copies the logits to fp32. In this many chunks, each copy is freed before the next is made.
OUTPUT_CHUNKS = 8

Weights = Mapping[str, Any]


def build_model(config: RunConfig, *, weights: Weights, device: torch.device, world: World) -> nn.Module:
    """Build the model that a config names, load its weights, and return it on ``device`` in training mode.

    With several data ranks it is sharded by FSDP2, layer by layer. Ranks of a tensor-parallel group compute each layer
    together. With several ranks this function is a collective. ``weights`` have the names that the unsharded model has.
    If the model has adapters, all else is frozen.
    """
    with errors_of(f"dtype={config.dtype} on {device}"):  # which may not compute in bf16
        torch_dtype = training.get_dtype(config.dtype, device=device)
    common_utils._use_low_cpu_ram = config.low_cpu_ram  # torchtune has no other way; its builders read it
    with training.set_default_dtype(torch_dtype), torch.device("meta") if world.size > 1 else device:
        model: nn.Module = build(config.model)
        if config.quantizer is not None:
            quantize_in_training(model, build(config.quantizer), dtype=torch_dtype)
    if hasattr(model, "set_num_output_chunks"):
        model.set_num_output_chunks((config.loss or {}).get("num_output_chunks", OUTPUT_CHUNKS))  # type: ignore[operator]
    if adapters := peft.get_adapter_params(model):
        weights = {**weights, **start_adapters(model, adapters, seed=config.seed or 0)}
    if config.compile:
        training.compile_model(model, verbose=False)
    if world.tensor_parallel > 1:
        way_out = "choose a model without adapters, or set tensor_parallel_dim=1"
        with errors_of("tensor_parallel_plan", way_out, kind=NotImplementedError):
            training.prepare_mha_for_tp(model, world.mesh["tp"])
            parallelize_module(model, world.mesh["tp"], parallelize_plan=build(config.tensor_parallel_plan))
    _checkpoint_activations(model, config)
    offload = config.fsdp_cpu_offload and device.type != "cpu"  # on the CPU all of it is there
    if offload and world.data_size == 1:
        raise ValueError(
            "fsdp_cpu_offload is for a sharded model, and there is 1 data rank; start more (--nproc_per_node), or set "
            "it to False"
        )
    if offload:
        training.set_torch_num_threads()  # the optimizer's step runs on the CPU
    if world.data_size > 1:
        _shard(model, config, world, cpu_offload=offload)
    if world.size > 1:
        with training.set_default_dtype(torch_dtype), device:
            for module in model.modules():
                if hasattr(module, "rope_init"):  # computes a buffer that is in no checkpoint
                    module.rope_init()  # type: ignore[operator]
    _load(model, weights, device=device, world=world, cpu_offload=offload)
    training.validate_no_params_on_meta_device(model)
    training.validate_expected_param_dtype(model.named_parameters(), dtype=torch_dtype)
    for module in model.modules():
        if hasattr(module, "initialize_dora_magnitude"):  # needs the norms of the base weights
            module.initialize_dora_magnitude()  # type: ignore[operator]
    return model.train()


def activation_context(config: RunConfig, model: nn.Module) -> AbstractContextManager[Any]:
    """Return the context of a forward pass, in which activations are moved to the host where a config says so."""
    if config.enable_activation_offloading and (kind := next(model.parameters()).device.type) != "cuda":
        raise ValueError(
            f"enable_activation_offloading=True moves activations off a GPU, and the device is {kind}; leave it out"
        )
    with errors_of("enable_activation_offloading", kind=NotImplementedError):
        context: AbstractContextManager[Any] = training.get_act_offloading_ctx_manager(
            model, config.enable_activation_offloading
        )
    return context


def _checkpoint_activations(model: nn.Module, config: RunConfig) -> None:
    """Make layers compute their activations again in the backward pass, with the same dropout.

    torchtune's ``apply_selective_activation_checkpointing`` draws other dropout then, and counts layers across models.
    """
    if config.enable_activation_checkpointing or config.ac_mode is not None:
        layers = [each for each in model.modules() if isinstance(each, modules.TransformerSelfAttentionLayer)]
        every = config.ac_option or 1 if config.ac_mode == "selective" else 1
        chosen = {*layers[every - 1 :: every]}
        training.set_activation_checkpointing(
            model, auto_wrap_policy=lambda module, recurse, **_: recurse or module in chosen
        )


def _shard(model: nn.Module, config: RunConfig, world: World, *, cpu_offload: bool) -> None:
    # torchao raises it: a rank needs complete groups of 64 * 256 quantized numbers.
    way_out = "use a number of ranks that divides its quantized weights (powers of 2 usually do), or do not quantize"
    with errors_of(f"model: cannot be sharded over {world.size} ranks", way_out, kind=AssertionError):
        training.shard_model(
            model,
            [partial(training.get_shard_conditions, names_to_match=config.custom_sharded_layers)],
            cpu_offload=cpu_offload,
            reshard_after_forward=config.fsdp_reshard_after_forward,
            dp_mesh=world.data_mesh,
        )


def _load(
    model: nn.Module, weights: Weights, *, device: torch.device, world: World, cpu_offload: bool
) -> None:
    way_out = "set it to 1, or do not quantize the base"
    try:
        with errors_of(f"data_parallel_replicate_dim={world.replicas}", way_out, kind=NotImplementedError):
            if world.size > 1:
                training.load_from_full_model_state_dict(
                    model, weights, device, strict=True, cpu_offload=cpu_offload
                )
            else:
                model.load_state_dict(weights)
    except (RuntimeError, AttributeError) as error:
        raise _unfit_weights(model, weights) or error from error


def start_adapters(
    model: nn.Module, adapters: Mapping[str, torch.Tensor], *, seed: int
) -> dict[str, torch.Tensor]:
    """Freeze all but the ``adapters`` of a model, and return their initial weights.

    As in LoRA's paper, A is random and B is zero, so that the model first computes what its base computes. The values
    depend on ``seed`` alone, not on the number of ranks or the device.
    """
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
        f"{name} is {given.get(name, 'missing')} in the checkpoint and {wanted.get(name, 'missing')} in the model"
        for name in wanted | given
        if given.get(name) != wanted.get(name)
    ]
    more = f"; and {len(found) - 3} more" if len(found) > 3 else ""
    if not found:
        return None
    return ValueError(
        f"the checkpointer's weights do not fit the model: {'; '.join(found[:3])}{more}; name the model that the "
        "checkpoint is of"
    )


def full_weights(model: nn.Module, *, device: torch.device, world: World) -> dict[str, torch.Tensor]:
    """Gather all weights on the CPU of rank 0, under the names they were loaded by; a collective. Empty elsewhere."""
    if world.size > 1:
        weights: dict[str, torch.Tensor] = training.gather_cpu_state_dict(model, world.is_main, device=device)
        return weights
    return {name: value.cpu() for name, value in model.state_dict().items()}


def seed_step(seed: int, step: int, rank: int = 0) -> None:
    """Seed torch's generators (dropout) by (seed, step, rank), so that a checkpoint need not store their state."""
    torch.manual_seed(hash((seed, step, rank)) & (2**63 - 1))
