"""Train low-rank adapters of a torchtune model on a streamed, packed corpus: the loop of `full_finetune`.

    tune run streampack_recipes/lora_finetune --config my.yaml max_steps=100
    tune run --nproc_per_node 2 streampack_recipes/lora_finetune --config my.yaml

LoRA, DoRA or, on a quantized base, QLoRA: as the torchtune builder in the config says. The base is frozen, and running
checkpoints hold the adapters only. The final weights go to two folders, because transformers applies an adapter that
lies beside weights: ``adapter/`` holds the adapters, ``epoch_0/`` the base with the adapters merged in.
"""

import sys
from functools import partial

from omegaconf import DictConfig
from streampack_recipes import full_finetune

from streampack.training.entry import parse

train = partial(full_finetune.train, adapters=True)


@parse
def recipe_main(raw: DictConfig) -> None:
    """Train low-rank adapters of a torchtune model on a streamed, packed corpus."""
    train(raw)


if __name__ == "__main__":
    sys.exit(recipe_main())
