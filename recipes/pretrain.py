"""Pretrain a torchtune model: the loop of `full_finetune`, under the name that configs for pretraining go by.

tune run streampack_recipes/pretrain --config my.yaml max_steps=100
tune run --nproc_per_node 2 streampack_recipes/pretrain --config my.yaml
"""

import sys

from streampack_recipes.full_finetune import recipe_main, train

__all__ = ["recipe_main", "train"]

if __name__ == "__main__":
    sys.exit(recipe_main())
