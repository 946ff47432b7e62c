"""Set up a `Trainer` for packs with images, and refuse ranks that would wait for one another for ever."""

from __future__ import annotations

from typing import TYPE_CHECKING

from streampack.attention.pretrained import find_pretrained
from streampack.attention.vision import FAMILIES
from streampack.streaming.dataset import IterablePackedDataset

if TYPE_CHECKING:
    from transformers import Trainer


def set_up_for_images(trainer: Trainer) -> None:
    """Weigh tokens in every family; refuse ranks that would wait for ever for one whose batch holds no image."""
    model = find_pretrained(trainer.model)
    if model is None:  # which is refused when it is prepared
        return
    if model.config.model_type in FAMILIES:
        # Of all of them, by a test, the loss takes num_items_in_batch, though qwen2_5_vl and qwen3_vl say it does not.
        trainer.model_accepts_loss_kwargs = True
    if trainer.args.world_size == 1:
        return
    if not trainer.accelerator.distributed_type.value.startswith(("NO", "MULTI_")):
        raise ValueError(
            "FSDP and ZeRO gather weights of the tower of images when they are used, and a batch of one rank may hold "
            "no image while others' do, so that they would wait for it for ever; train with DDP"
        )
    text = {
        id(each)
        for part in (model.get_decoder(), model.get_output_embeddings())
        for each in part.parameters()
    }
    # The tower, and what leads from it to the text: projectors, marks of new lines.
    seeing = [name for name, each in model.named_parameters() if each.requires_grad and id(each) not in text]
    handler = trainer.accelerator.ddp_handler
    if seeing and not (handler is not None and handler.find_unused_parameters):
        raise ValueError(
            f"{seeing[0]} is trained, which only images reach, and a batch of one rank may hold none while others' "
            "do, so that they would wait for its gradients for ever; set ddp_find_unused_parameters=True, or freeze "
            "all but the language model"
        )


def require_announced(packs: IterablePackedDataset) -> None:
    """Raise for a batch with images of packs that were not known to have any."""
    if not packs.lane_config.reads_images:
        raise ValueError(
            "samples have images, and nothing said so before the training, which then checks ranks, loss and "
            "isolation with images; give the encoder reads_images = True, or the packs max_media"
        )
