"""Tiny vision-language models with their processors, made on the spot: random weights, 310 tokens."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import nn

from tests.harness.hf_tokenizers import TEXT

SPECIAL = [
    "<pad>", "<s>", "</s>", "<|im_end|>", "<image>", "<video>", "<start_of_image>", "<end_of_image>", "<img>", "</img>",
    "<fake_token_around_image>", "<global-img>", "<end_of_utterance>", "[IMG_BREAK]", "[IMG_END]",
    *(f"<row_{i}_col_{j}>" for i in (1, 2) for j in (1, 2)),
]  # fmt: skip
ID = {token: number for number, token in enumerate(SPECIAL)}
TEMPLATE = (
    "{% for m in messages %}{{ '<s>' + m['role'] + '\n' }}{% if m['role'] == 'assistant' %}{% generation %}"
    "{% for p in m['content'] %}{% if p['type'] == 'image' %}<|PLACE|>{% else %}{{ p['text'] }}{% endif %}{% endfor %}"
    "{{ '<|im_end|>' }}{% endgeneration %}{% else %}"
    "{% for p in m['content'] %}{% if p['type'] == 'image' %}<|PLACE|>{% else %}{{ p['text'] }}{% endif %}{% endfor %}"
    "{{ '<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<s>assistant\n' }}{% endif %}"
)
PATCH, SIZE = 4, 16
TEXT_CONFIG: dict[str, Any] = {
    "vocab_size": 320, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 512, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
MROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}}
TOWER: dict[str, Any] = {
    "hidden_size": 16, "embed_dim": 16, "intermediate_size": 24, "num_hidden_layers": 2, "depth": 2, "num_heads": 2,
    "num_attention_heads": 2, "patch_size": PATCH, "image_size": SIZE, "out_hidden_size": 32, "head_dim": 8,
    "fullatt_block_indexes": [1], "window_size": 16, "deepstack_visual_indexes": [0], "num_position_embeddings": 16,
    "vision_use_head": False, "projection_dim": 16,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2_vl": {"text": MROPE, "tower": {"hidden_size": 32, "mlp_ratio": 2}},
    "qwen2_5_vl": {"text": MROPE},
    "qwen3_vl": {"text": MROPE},
    "gemma3": {"text": {"sliding_window": 12, "layer_types": ["sliding_attention", "full_attention"],
                        "query_pre_attn_scalar": 8}, "config": {"mm_tokens_per_image": 4}},
    "llava": {"config": {"image_seq_length": 16}},
    "llava_onevision": {"config": {"image_grid_pinpoints": [[16, 16], [16, 32], [32, 16]]}},
    "idefics3": {"config": {"scale_factor": 2}},
    "smolvlm": {"config": {"scale_factor": 2}},
    "internvl": {"tower": {"image_size": [SIZE, SIZE], "patch_size": [PATCH, PATCH]},
                 "config": {"image_seq_length": 4, "downsample_ratio": 0.5}},
    "mistral3": {"config": {"spatial_merge_size": 2, "vision_feature_layer": -1}},
}  # fmt: skip


def build(family: str) -> nn.Module:
    """Make a model in eval mode, tower and all in fp32, the same at every call."""
    transformers = pytest.importorskip("transformers")
    own = FAMILIES[family]
    default = transformers.AutoConfig.for_model(family)
    vision, text = default.vision_config, default.text_config
    tower = {name: value for name, value in (TOWER | own.get("tower", {})).items() if hasattr(vision, name)}
    config = type(default)(
        text_config={**TEXT_CONFIG, **own.get("text", {}), "model_type": text.model_type},
        vision_config={**tower, "model_type": vision.model_type},
        image_token_id=ID["<image>"], image_token_index=ID["<image>"],
        video_token_id=ID["<video>"], video_token_index=ID["<video>"],
        tie_word_embeddings=False,
        **own.get("config", {}),
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = transformers.AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
        for parameter in model.parameters():
            nn.init.normal_(parameter, std=0.15)
    return model.eval()


def tokenizer_of(**named: str) -> Any:
    """A byte-level BPE with all special tokens; ``named`` are attributes under which processors look for some."""
    tokenizers, transformers = pytest.importorskip("tokenizers"), pytest.importorskip("transformers")
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=310, special_tokens=SPECIAL, show_progress=False, initial_alphabet=alphabet
    )
    made.train_from_iterator(TEXT, trainer)
    special = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, **special, extra_special_tokens=named)


SQUARE = {"height": SIZE, "width": SIZE}
TILES = {"size": {"longest_edge": 2 * SIZE}, "max_image_size": {"longest_edge": SIZE}}
SEES, FILMS = {"image_token": "<image>"}, {"image_token": "<image>", "video_token": "<video>"}
# The image processor and its settings, the processor, its names of tokens, its settings.
PROCESSORS: dict[str, tuple[str, dict[str, Any], str, dict[str, str], dict[str, Any]]] = {
    "qwen": ("Qwen2VL", {"patch_size": PATCH, "merge_size": 2, "temporal_patch_size": 2,
             "size": {"shortest_edge": 64, "longest_edge": 1024}}, "Qwen2VL", FILMS, {"video_processor": None}),
    "gemma3": ("Gemma3", {"size": SQUARE}, "Gemma3", SEES | {"boi_token": "<start_of_image>",
               "eoi_token": "<end_of_image>"}, {"image_seq_length": 4}),
    "llava": ("Llava", {"size": {"shortest_edge": SIZE}, "crop_size": SQUARE}, "Llava", SEES, {"patch_size": PATCH,
              "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}),
    "llava_onevision": ("LlavaOnevision", {"size": SQUARE, "image_grid_pinpoints": [[16, 16], [16, 32], [32, 16]]},
                        "LlavaOnevision", FILMS, {"video_processor": None, "num_image_tokens": 16,
                        "vision_feature_select_strategy": "full"}),
    "idefics3": ("Idefics3", TILES, "Idefics3", SEES, {"image_seq_len": 4}),
    "smolvlm": ("SmolVLM", TILES, "SmolVLM", SEES, {"video_processor": None, "image_seq_len": 4}),
    "internvl": ("GotOcr2", {"size": SQUARE, "crop_to_patches": True, "min_patches": 1, "max_patches": 2}, "InternVL",
                 {"start_image_token": "<img>", "end_image_token": "</img>", "context_image_token": "<image>",
                  "video_token": "<video>"}, {"video_processor": None, "image_seq_length": 4}),
    "mistral3": ("Pixtral", {"patch_size": PATCH, "size": {"longest_edge": 24}}, "", {}, {}),
}  # fmt: skip


@cache
def processor_of(family: str) -> Any:
    """Make the family's processor, with small images and without the part for videos."""
    t, smolvlm = pytest.importorskip("transformers"), "transformers.models.smolvlm.processing_smolvlm"
    images, sizes, kind, names, settings = PROCESSORS["qwen" if "qwen" in family else family]
    template = TEMPLATE.replace("<|PLACE|>", "<start_of_image>" if family == "gemma3" else "<image>")
    module = import_module(smolvlm) if kind == "SmolVLM" else t
    make = getattr(module, f"{kind}Processor") if kind else pixtral_like(t)
    own = getattr(t, f"{images}ImageProcessorPil")(**sizes)
    parts = {"image_processor": own, "tokenizer": tokenizer_of(**names)}
    unchecked = patch.object(t.ProcessorMixin, "check_argument_for_proper_class")
    with unchecked, patch(f"{smolvlm}.num2words", print):
        made = make(**parts, chat_template=template, **settings)
    if family == "smolvlm":  # it asks how videos are sampled, in texts without any
        kinds = import_module("transformers.processing_utils").VideosKwargs
        made.video_processor = SimpleNamespace(num_frames=1, fps=1, valid_kwargs=kinds)
    return made


def pixtral_like(t: Any) -> Any:
    """Pixtral's processor, which transformers imports only beside torchvision."""

    class Processor(t.ProcessorMixin):  # type: ignore[misc, name-defined]
        def __init__(self, image_processor: Any, tokenizer: Any, chat_template: str) -> None:
            super().__init__(image_processor, tokenizer, chat_template=chat_template)
            self.image_token, self.image_token_id = "<image>", ID["<image>"]

        @property
        def image_token_ids(self) -> list[int]:
            return [ID[token] for token in ("<image>", "[IMG_BREAK]", "[IMG_END]")]

        def _process_images(self, images: Any, **settings: Any) -> Any:
            return super()._process_images(images, **settings | {"patch_size": 2 * PATCH})

        def replace_image_token(self, image_inputs: Any, image_idx: int, **_: Any) -> str:
            height, width = (int(side) // (2 * PATCH) for side in image_inputs["image_sizes"][image_idx])
            line = "<image>" * width
            return "[IMG_BREAK]".join([line] * height) + "[IMG_END]"

    return Processor


def picture(number: int, *, width: int = 23, height: int = 14) -> np.ndarray[Any, Any]:
    """Return an image of noise, [height, width, 3] uint8."""
    return np.random.default_rng(number).integers(0, 256, (height, width, 3), dtype=np.uint8)
