"""TRL's SFTTrainer on packs of the samples that it has tokenized."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from streampack import (
    IGNORE_INDEX,
    IterablePackedDataset,
    PackedDataLoader,
    TokensEncoder,
    prepare_trainer_for_packing,
)
from tests.harness.hf_trainers import (
    MAX_SEQ_LEN,
    assert_same,
    held_out,
    losses,
    model,
    settings,
    stream,
    trainer_of,
    truth,
)
from tests.oracle.padding import padded

datasets = pytest.importorskip("datasets")
transformers = pytest.importorskip("transformers")
trl = pytest.importorskip("trl")

# TRL 1.16 switches it on by its old name.
pytestmark = pytest.mark.filterwarnings("ignore:`gradient_checkpointing:FutureWarning")

STEPS = 12


def tokenizer() -> Any:
    """Make a tokenizer of 300 words."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = ["<pad>", "<eos>", *(f"w{i}" for i in range(300))]
    made = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<pad>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>")


def text(count: int = 300) -> Any:
    """Make prompts of words up to w99 and completions of later words."""
    generator = torch.Generator().manual_seed(0)

    def words(low: int, high: int) -> str:
        (length,) = torch.randint(1, 10, (1,), generator=generator).tolist()
        return " ".join(f"w{i}" for i in torch.randint(low, high, (length,), generator=generator).tolist())

    rows = [{"prompt": words(0, 100), "completion": " " + words(100, 110)} for _ in range(count)]
    return datasets.Dataset.from_list(rows)


def sft(folder: Path, **changes: Any) -> Any:
    args = settings(folder, trl.SFTConfig, max_steps=STEPS, bf16=False, dataset_num_proc=None, **changes)
    trainer = trl.SFTTrainer(model(), args, train_dataset=text(), processing_class=tokenizer())
    trainer.remove_callback(transformers.PrinterCallback)
    return trainer


def packs_of(trainer: Any) -> IterablePackedDataset:
    return IterablePackedDataset(
        trainer.train_dataset,
        max_seq_len=MAX_SEQ_LEN,
        encoder=TokensEncoder(tokens="input_ids"),
        shuffle=True,
        epochs=4,
        num_lanes=2,
    )


def packed(folder: Path, **changes: Any) -> Any:
    trainer = sft(folder, **changes)
    prepare_trainer_for_packing(trainer, train_dataset=packs_of(trainer))
    return trainer


def test_only_completions_are_trained_with_the_losses_of_padded_batches(tmp_path: Path) -> None:
    theirs = sft(tmp_path / "padded")
    rows = list(theirs.train_dataset)
    items, sizes, batches = [], [], []
    for batch in PackedDataLoader(packs_of(theirs), batch_size=2, packs_per_step=4):
        parts = [rows[fragment.row_id[0]] for pack in batch.fragments for fragment in pack]
        batches.append(padded(parts))
        items.append(sum(label != IGNORE_INDEX for row in parts for label in row["labels"]))
        sizes.append(sum(len(row["input_ids"]) for row in parts))
    # TRL's labels are the completions with their end tokens.
    completions = [len(row["completion"].split()) + 1 for row in text()]
    assert [sum(label != IGNORE_INDEX for label in row["labels"]) for row in rows] == completions

    ours = packed(tmp_path / "packed")
    counted = []
    count = ours.get_batch_samples

    def spy(*args: Any) -> Any:
        samples, number = count(*args)
        counted.append(int(number))
        trained = {
            int(token) for sample in samples for token in sample["input_ids"][sample["labels"].ne(-100)]
        }
        assert trained - set(range(102, 112)) == {1}  # words of completions and end tokens
        return samples, number

    ours.get_batch_samples = spy
    ours.train()
    assert counted == [a + b for a, b in zip(items[::2], items[1::2], strict=True)][:STEPS]
    theirs.get_train_dataloader = lambda: batches
    theirs.train()
    curve = losses(ours)
    assert curve[STEPS] < curve[1] - 0.5
    assert_same(curve, losses(theirs), within=1e-4, steps=range(1, STEPS + 1))
    last = [entry for entry in ours.state.log_history if "loss" in entry][-1]
    assert last["num_tokens"] == sum(sizes[: 2 * STEPS])  # although TRL sums a mask that holds boundaries


def test_the_evaluation_loss_is_the_mean_over_tokens(tmp_path: Path) -> None:
    """`evaluate` takes packs, which TRL would tokenize."""
    trainer = sft(tmp_path, per_device_eval_batch_size=2)
    prepare_trainer_for_packing(trainer, train_dataset=packs_of(trainer))
    trainer.train()
    rows = list(trainer.train_dataset.lane_config.source.dataset)[:40]
    packs = IterablePackedDataset(rows, encoder=TokensEncoder(tokens="input_ids"), max_seq_len=MAX_SEQ_LEN)
    metrics = trainer.evaluate(packs)
    *_, trained, _, evaluated = trainer.state.log_history
    assert evaluated["eval_num_tokens"] == trained["num_tokens"] > 0
    assert metrics["eval_loss"] == pytest.approx(
        truth(trainer.model, [{"tokens": row["input_ids"], "labels": row["labels"]} for row in rows]),
        rel=1e-5,
    )


def test_rows_that_trl_packed_or_flattened_are_refused(tmp_path: Path) -> None:
    trainer = sft(tmp_path, packing=True, max_length=MAX_SEQ_LEN)
    for name in ("packing", "padding_free", "eval_packing"):
        for other in ("packing", "padding_free", "eval_packing"):
            setattr(trainer.args, other, name == other)
        with pytest.raises(
            ValueError, match=f"SFTConfig has {name}=True, .* leave it out, packing is done here"
        ):
            prepare_trainer_for_packing(trainer, train_dataset=packs_of(trainer))
    trainer.args.eval_packing = None
    with pytest.raises(ValueError, match=r"the row holds \d+ sequences, as seq_lengths says"):
        next(iter(packs_of(trainer)))


def test_packs_of_other_rows_need_a_stand_in_for_trl(tmp_path: Path) -> None:
    """`SFTTrainer` refuses packs; over a `Dataset` of one row it trains and evaluates them as Trainer does."""
    stand_in = datasets.Dataset.from_dict({"input_ids": [[0]]})
    changes: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 4, "gradient_checkpointing": False}
    args = settings(tmp_path / "trl", trl.SFTConfig, bf16=False, lr_scheduler_type="linear", **changes)
    with pytest.raises(
        TypeError, match="must be a `Dataset` or `IterableDataset`, got `IterablePackedDataset`"
    ):
        trl.SFTTrainer(model(), args, train_dataset=stream(), processing_class=tokenizer())
    ours = trl.SFTTrainer(
        model(), args, train_dataset=stand_in, eval_dataset=stand_in, processing_class=tokenizer()
    )
    ours.remove_callback(transformers.PrinterCallback)
    prepare_trainer_for_packing(ours, train_dataset=stream(), eval_dataset=held_out())
    theirs = trainer_of(tmp_path / "plain", eval_dataset=held_out(), **changes)
    prepare_trainer_for_packing(theirs, train_dataset=stream())
    ours.train()
    theirs.train()
    assert_same(losses(ours), losses(theirs), within=1e-5, steps=range(1, STEPS + 1))
    evaluated = [
        [entry["eval_loss"] for entry in each.state.log_history if "eval_loss" in entry]
        for each in (ours, theirs)
    ]
    assert evaluated[0] == pytest.approx(evaluated[1], rel=1e-5)
    assert len(evaluated[0]) == 3


def test_trainers_of_other_losses_are_refused() -> None:
    from trl import DPOTrainer, RewardTrainer

    for kind, name in ((RewardTrainer, "RewardTrainer"), (type("Mine", (DPOTrainer,), {}), "DPOTrainer")):
        with pytest.raises(
            ValueError, match=f"^{name} compares, scores .* in a loss of its own; .* with the dpo recipe"
        ):
            prepare_trainer_for_packing(kind.__new__(kind))  # refused by its class
