"""Packs that are longer than a model's table of positions."""

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
from streampack.attention.positions import position_table, require_positions
from streampack.integrations.hf_trainer import prepare_trainer_for_packing
from streampack.map_style.flatten import join_documents
from streampack.packing.settings import Packing
from streampack.types import IGNORE_INDEX
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


@pytest.mark.parametrize("attention", ["dense", "varlen"])
def test_padding_gets_positions_of_the_table(attention: str) -> None:
    """The model has 128 positions; the last batch has more than 272 tokens of padding, and a null pack."""
    model = gpt2()
    inputs = prepare_model_for_packing(model, attention=attention)
    batches = list(PackedDataLoader(packs([128, 100, 60, 128, 90, 128, 128, 128, 20]), batch_size=2))
    assert any(not fragments for batch in batches for fragments in batch.fragments), "a null pack"
    for batch in batches:
        arguments = inputs(batch)
        assert int(arguments["position_ids"].max()) < POSITIONS
        packed = model(**arguments).logits
        assert packed.isfinite().all()
        for row, fragments in enumerate(batch.fragments):
            at = 0
            for fragment in fragments:
                length = fragment.stop - fragment.start
                alone = model(batch.tokens[row, None, at : at + length]).logits[0]
                assert torch.allclose(packed[row, at : at + length], alone, atol=1e-5)
                at += length


@pytest.mark.parametrize("attention", ["dense", "varlen"])
def test_a_longer_sample_is_refused(attention: str) -> None:
    inputs = prepare_model_for_packing(gpt2(), attention=attention)
    [batch] = PackedDataLoader(packs([20, 129]), batch_size=1)
    message = (
        "a sample has 129 tokens, and this gpt2 model has 128 positions; leave out or cut samples that are longer, "
        "as with max_seq_len=128"
    )
    with pytest.raises(ValueError, match=message):
        inputs(batch)
    row = {"input_ids": torch.ones(1, 149, dtype=torch.int64), "seq_lens": torch.tensor([[20, 129]])}
    with pytest.raises(ValueError, match=message):
        inputs(row)


def test_tokens_of_a_dict_without_labels_are_padding() -> None:
    inputs = prepare_model_for_packing(gpt2())
    row = {"input_ids": torch.ones(1, 400, dtype=torch.int64), "seq_lens": torch.tensor([[100, 300]])}
    labels = torch.full((1, 400), IGNORE_INDEX)
    labels[:, :100] = 1
    assert int(inputs(row | {"labels": labels})["position_ids"].max()) < POSITIONS
    labels[:, 399] = 1
    with pytest.raises(ValueError, match="a sample has 300 tokens"):
        inputs(row | {"labels": labels})


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


def test_tables() -> None:
    sizes = {"vocab_size": VOCAB, "num_hidden_layers": 1, "num_attention_heads": 2}
    opt = OPTConfig(**sizes, hidden_size=16, ffn_dim=16, max_position_embeddings=64, word_embed_proj_dim=16)
    gptj = GPTJConfig(vocab_size=VOCAB, n_layer=1, n_head=2, n_embd=16, n_positions=96, rotary_dim=4)
    llama = LlamaConfig(**sizes, hidden_size=16, intermediate_size=16, max_position_embeddings=32)
    assert position_table(gpt2()) == POSITIONS
    assert position_table(OPTForCausalLM(opt)) == 64
    assert position_table(GPTJForCausalLM(gptj)) == 96
    assert position_table(LlamaForCausalLM(llama)) is None


@pytest.mark.parametrize("overlong", ["split", "truncate"])
def test_settings_that_cut_samples_beyond_the_table_are_refused(tmp_path: Path, overlong: str) -> None:
    message = f"overlong='{overlong}' cuts samples to max_seq_len=400 tokens, and the model has 128 positions"
    with pytest.raises(ValueError, match=message):
        require_positions(gpt2(), Packing(400, overlong=overlong))
    with pytest.raises(ValueError, match=message):
        prepare_trainer_for_packing(trainer(tmp_path, packs([128] * 20, overlong=overlong)))
    require_positions(gpt2(), Packing(128, overlong=overlong))
    require_positions(gpt2(), Packing(400))


def trainer(folder: Path, data: IterablePackedDataset, model: Any = None) -> Trainer:
    args = TrainingArguments(
        str(folder), max_steps=3, per_device_train_batch_size=2, use_cpu=True, report_to="none",
        disable_tqdm=True, log_level="error", logging_strategy="no", save_strategy="no",
    )  # fmt: skip
    return Trainer(model or gpt2(), args, train_dataset=data)


def test_a_trainer_refuses_packs_that_are_too_long(tmp_path: Path) -> None:
    """Its evaluation data too, which would otherwise fail hours later."""
    config = LlamaConfig(
        vocab_size=VOCAB, num_hidden_layers=1, num_attention_heads=2, hidden_size=16, intermediate_size=16,
        max_position_embeddings=64, rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0},
    )  # fmt: skip
    short, long = packs([20] * 40, max_seq_len=64), packs([20] * 40)
    message = "max_seq_len is 400, but a packed llama model with this config keeps samples apart up to 64"
    with pytest.raises(ValueError, match=message):
        prepare_trainer_for_packing(trainer(tmp_path, long, LlamaForCausalLM(config)))
    one = trainer(tmp_path, short, LlamaForCausalLM(config))
    with pytest.raises(ValueError, match=message):
        prepare_trainer_for_packing(one, eval_dataset={"held out": packs([20] * 40, epochs=1)})
    prepare_trainer_for_packing(one, eval_dataset=packs([20] * 40, max_seq_len=64, epochs=1))


# torchtune's models.

LONG = 2 * MAX_SEQ_LEN + 9
ROWS = [
    {"tokens": [7] * 20, "labels": [7] * 20}
] * 2  # 33 tokens of padding: one more than there are positions


@pytest.mark.parametrize("attention", ["dense", "varlen"])
def test_rows_beyond_torchtunes_positions(attention: str) -> None:
    """They are refused; if a user raises the model's limit, padding gets positions of the table."""
    batch = collate_packed(list(IterablePackedDataset(ROWS, max_seq_len=LONG)))
    model = build("llama3").eval()
    assert position_table(model) == MAX_SEQ_LEN
    inputs = prepare_model_for_packing(model, attention=attention)
    message = (
        f"packs have {LONG} tokens, and the model has max_seq_len={MAX_SEQ_LEN}; set max_seq_len={MAX_SEQ_LEN} or "
        f"less for the packs, or build the model with max_seq_len={LONG}"
    )
    with pytest.raises(ValueError, match=message):
        inputs(batch)
    model.max_seq_len = LONG
    logits = model(**inputs(batch))
    assert torch.allclose(logits[0, :20], model(batch.tokens[:, :20])[0], atol=1e-5)
    assert torch.allclose(logits[0, 20:40], logits[0, :20], atol=1e-5)
    with pytest.raises(ValueError, match="a sample has 40 tokens, and this torchtune model has 32 positions"):
        inputs(join_documents(batch))


def test_the_probe_calls_torchtunes_models() -> None:
    model = build("llama3")
    assert "sample" in {leak.kind for leak in find_leaks(model).leaks}, "no mask"
    prepare_model_for_packing(model, attention="varlen")
    assert find_leaks(model).ok
    assert find_leaks(torch.compile(model, backend="eager")).ok  # type: ignore[arg-type]
