"""Tables of positions limit the length of packs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    CLIPVisionConfig,
    GPT2Config,
    GPT2LMHeadModel,
    GPTJConfig,
    GPTJForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    LlavaConfig,
    LlavaForConditionalGeneration,
    OPTConfig,
    OPTForCausalLM,
    Trainer,
    TrainingArguments,
)

from streampack import (
    IterablePackedDataset,
    PackedDataLoader,
    collate_packed,
    find_leaks,
    prepare_model_for_packing,
)
from streampack.attention.positions import position_table
from streampack.integrations.hf_trainer import prepare_trainer_for_packing
from tests.support.tiny_torchtune import MAX_SEQ_LEN, build

POSITIONS, VOCAB = 128, 50


def gpt2(dropout: float = 0.0) -> GPT2LMHeadModel:
    torch.manual_seed(0)
    config = GPT2Config(
        n_positions=POSITIONS, n_embd=16, n_layer=2, n_head=2, vocab_size=VOCAB, attn_pdrop=dropout,
        embd_pdrop=0.0, resid_pdrop=0.0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def packs(lengths: list[int], **settings: Any) -> IterablePackedDataset:
    rows = [{"tokens": [1 + i % 40] * n, "labels": [1 + i % 40] * n} for i, n in enumerate(lengths)]
    return IterablePackedDataset(rows, **{"max_seq_len": 400, "num_lanes": 1, **settings})


def test_tables_of_an_image_model_do_not_count() -> None:
    text = LlamaConfig(
        vocab_size=VOCAB, num_hidden_layers=1, num_attention_heads=2, hidden_size=16, intermediate_size=16
    )
    vision = CLIPVisionConfig(
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        image_size=4,
        patch_size=2,
    )
    model = LlavaForConditionalGeneration(LlavaConfig(text_config=text, vision_config=vision))
    patches = [m for name, m in model.named_modules() if name.endswith("position_embedding")]
    assert [table.num_embeddings for table in patches] == [5]
    assert position_table(model) is None


def test_position_tables_are_found() -> None:
    sizes = {"vocab_size": VOCAB, "num_hidden_layers": 1, "num_attention_heads": 2}
    opt = OPTConfig(**sizes, hidden_size=16, ffn_dim=16, max_position_embeddings=64, word_embed_proj_dim=16)
    gptj = GPTJConfig(vocab_size=VOCAB, n_layer=1, n_head=2, n_embd=16, n_positions=96, rotary_dim=4)
    llama = LlamaConfig(**sizes, hidden_size=16, intermediate_size=16, max_position_embeddings=32)
    assert position_table(gpt2()) == POSITIONS
    assert position_table(OPTForCausalLM(opt)) == 64
    assert position_table(GPTJForCausalLM(gptj)) == 96
    assert position_table(LlamaForCausalLM(llama)) is None


def test_packs_longer_than_the_table_are_refused() -> None:
    """On CUDA, the model would abort the process."""
    inputs = prepare_model_for_packing(gpt2())
    [batch] = PackedDataLoader(packs([100, 20], max_seq_len=POSITIONS))
    assert int(inputs(batch)["position_ids"].max()) == 99
    [batch] = PackedDataLoader(packs([100, 20], max_seq_len=POSITIONS + 1))
    message = "max_seq_len is 129, and this gpt2 model has 128 positions; set max_seq_len=128 or less"
    with pytest.raises(ValueError, match=message):
        inputs(batch)


def trainer(folder: Path, data: IterablePackedDataset, model: Any = None) -> Trainer:
    args = TrainingArguments(
        str(folder), max_steps=3, per_device_train_batch_size=2, use_cpu=True, report_to="none",
        disable_tqdm=True, log_level="error", logging_strategy="no", save_strategy="no",
    )  # fmt: skip
    return Trainer(model or gpt2(), args, train_dataset=data)


def test_a_trainer_refuses_packs_that_are_too_long(tmp_path: Path) -> None:
    """Its evaluation data too, which would otherwise fail hours later."""
    short, long = packs([20] * 40, max_seq_len=POSITIONS), packs([20] * 40)
    message = f"max_seq_len is 400, and this gpt2 model has {POSITIONS} positions"
    with pytest.raises(ValueError, match=message):
        prepare_trainer_for_packing(trainer(tmp_path, long))
    one = trainer(tmp_path, short)
    with pytest.raises(ValueError, match=message):
        prepare_trainer_for_packing(one, eval_dataset={"held out": packs([20] * 40, epochs=1)})
    prepare_trainer_for_packing(one, eval_dataset=packs([20] * 40, max_seq_len=POSITIONS, epochs=1))


# torchtune's models.

LONG = 2 * MAX_SEQ_LEN + 9


def test_rows_beyond_torchtunes_positions_are_refused() -> None:
    rows = [{"tokens": [7] * 20, "labels": [7] * 20}]
    batch = collate_packed(list(IterablePackedDataset(rows, max_seq_len=LONG)))
    model = build("llama3")
    assert position_table(model) == MAX_SEQ_LEN
    message = (
        f"packs have {LONG} tokens, and the model has max_seq_len={MAX_SEQ_LEN}; set max_seq_len={MAX_SEQ_LEN} or "
        f"less for the packs, or build the model with max_seq_len={LONG}"
    )
    with pytest.raises(ValueError, match=message):
        prepare_model_for_packing(model)(batch)


def test_the_probe_calls_torchtunes_models() -> None:
    model = build("llama3")
    assert "sample" in {leak.kind for leak in find_leaks(model).leaks}, "no mask"
    prepare_model_for_packing(model, attention="varlen")
    assert find_leaks(model).ok
    assert find_leaks(torch.compile(model, backend="eager")).ok  # type: ignore[arg-type]
