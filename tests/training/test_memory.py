"""What the keys that save memory save: bytes of one step, counted on the CPU, where nothing depends on an allocator."""

from __future__ import annotations

import inspect
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from torchtune.models.llama3 import llama3
from torchtune.training import OffloadActivations

from streampack import IterablePackedDataset, collate_packed
from streampack.attention.prepare import prepare_model_for_packing
from streampack.losses import summed_cross_entropy
from streampack.training.checks import read_config
from streampack.training.model import build_model
from streampack.training.optimizer import build_optimizer
from streampack.training.world import World
from tests.harness.tiny import tiny_config

CPU = torch.device("cpu")
MODEL = {
    "vocab_size": 512, "num_layers": 8, "num_heads": 4, "num_kv_heads": 2, "embed_dim": 64,
    "max_seq_len": 128, "intermediate_dim": 192,
}  # fmt: skip
RULE = {
    name: each.default for name, each in inspect.signature(OffloadActivations.__init__).parameters.items()
}


class Saved(saved_tensors_hooks):
    """Notes what autograd keeps for the backward pass: bytes by storage, in the order in which they are saved."""

    def __init__(self, weights: set[int]) -> None:
        self.storages: dict[int, int] = {}

        def note(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in weights:
                self.storages[storage.data_ptr()] = storage.nbytes()
            return tensor

        super().__init__(note, lambda tensor: tensor)


def bytes_of_a_step(folder: Path, **changes: object) -> dict[str, int]:
    """Return the bytes of activations after the forward pass, and the most bytes of gradients in the backward pass.

    ``offloaded`` is what stays on the device with torchtune's offloading, whose class needs a GPU: by its rule, tensors
    below a size, the head's, and the last few that were saved.
    """
    config = read_config(
        tiny_config(
            folder, model={"_component_": "torchtune.models.llama3.llama3", **MODEL}, dtype="fp32", **changes
        )
    )
    torch.manual_seed(0)
    model = build_model(config, weights=llama3(**MODEL).state_dict(), device=CPU, world=World())
    inputs = prepare_model_for_packing(model, attention="dense")
    most = 0

    def note(_: torch.Tensor) -> None:
        nonlocal most
        most = max(most, sum(each.grad.nbytes for each in model.parameters() if each.grad is not None))

    for each in model.parameters():
        each.register_post_accumulate_grad_hook(note)
    build_optimizer(config, model)
    rows = [{"tokens": [i % 500] * 64, "labels": [i % 500] * 64} for i in range(4)]
    batch = collate_packed(list(IterablePackedDataset(rows, max_seq_len=128, num_lanes=1)))
    weights = {each.untyped_storage().data_ptr() for each in model.parameters()}
    saved, head = Saved(weights), Saved(weights)
    with saved, ExitStack() as of_head:
        model.output.register_forward_pre_hook(lambda *_: of_head.enter_context(head) and None)
        model.output.register_forward_hook(lambda *_: of_head.close())
        logits = model(**inputs(batch))
    moved = [size for size in saved.storages.values() if size >= RULE["min_offload_size"]]
    everything = sum((saved.storages | head.storages).values())
    stash = sum(moved[-RULE["max_fwd_stash_size"] :])
    found = {"activations": everything, "offloaded": everything - sum(moved) + stash}
    summed_cross_entropy(logits, batch.labels).backward()
    return found | {"gradients": most}


def test_what_each_key_saves(tmp_path):
    plain = bytes_of_a_step(tmp_path / "plain")
    assert plain["gradients"] == sum(value.nbytes for value in llama3(**MODEL).state_dict().values())
    found = {
        "selective": bytes_of_a_step(tmp_path / "selective", ac_mode="selective", ac_option=2),
        "full": bytes_of_a_step(tmp_path / "full", enable_activation_checkpointing=True),
        "in_bwd": bytes_of_a_step(
            tmp_path / "in_bwd", optimizer_in_bwd=True, clip_grad_norm=None, gradient_accumulation_steps=1
        ),
    }
    ratios = {
        "selective, every second layer": found["selective"]["activations"] / plain["activations"],
        "checkpointed": found["full"]["activations"] / plain["activations"],
        "checkpointed and offloaded": found["full"]["offloaded"] / plain["activations"],
        "gradients, optimizer in backward": found["in_bwd"]["gradients"] / plain["gradients"],
    }
    assert found["in_bwd"]["activations"] == plain["activations"]
    largest = max(value.nbytes for value in llama3(**MODEL).state_dict().values())
    assert found["in_bwd"]["gradients"] == largest, "one gradient at a time"
    assert ratios == pytest.approx(
        {
            "selective, every second layer": 0.53,
            "checkpointed": 0.055,
            "checkpointed and offloaded": 0.025,
            "gradients, optimizer in backward": 0.071,
        },
        rel=0.05,
    )
