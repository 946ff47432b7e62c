"""What a newcomer does wrong, by door: each is refused with what happened and the way out."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import streampack
from streampack import (
    AnswersEncoder,
    FlatteningCollator,
    IterablePackedDataset,
    JSONLSource,
    MapSource,
    Mix,
    MultipackBatchSampler,
    PackedDataLoader,
    PackedDataset,
    Storage,
    TextEncoder,
    TokensEncoder,
    method_loader,
    prepare_model_for_packing,
)
from streampack.cli import main
from streampack.tokenize import tokenize
from tests.harness import hf_trainers
from tests.harness.hf_tokenizers import byte_level

ROWS = [{"input_ids": [5] * 9}] * 9


def packs(source: Any, **settings: Any) -> IterablePackedDataset:
    return IterablePackedDataset(source, **{"max_seq_len": 64, **settings})


def first(source: Any, **settings: Any) -> Any:
    """Make the first pack."""
    return next(iter(packs(source, **settings)))


def of_file(content: str | bytes, **settings: Any) -> Any:
    """Make the first pack of a file of rows, in the working directory."""
    Path("rows.jsonl").write_bytes(content if isinstance(content, bytes) else content.encode())
    return first("rows.jsonl", **settings)


def of_text(content: str | bytes) -> Any:
    return of_file(content, encoder=TextEncoder(byte_level()))


def of_datasets(rows: list[dict[str, Any]]) -> Any:
    from datasets import Dataset, DatasetDict

    return DatasetDict(train=Dataset.from_list(rows))


def resumed(rows: int = 9, **settings: Any) -> None:
    """Resume a run of nine rows with other rows or settings."""
    loader = PackedDataLoader(packs(ROWS))
    next(iter(loader))
    other = PackedDataLoader(packs(ROWS[:1] * rows, **settings))
    other.load_state_dict(loader.state_dict())
    next(iter(other))


def trained(rows: list[dict[str, Any]]) -> None:
    trainer = hf_trainers.trainer_of(Path(), train_dataset=packs(rows, epochs=None), max_steps=2)
    streampack.prepare_trainer_for_packing(trainer)
    trainer.train()


def unprepared(data: Any, **settings: Any) -> None:
    """Train without `prepare_trainer_for_packing`."""
    hf_trainers.trainer_of(Path(), train_dataset=data, max_steps=2, **settings).train()


def map_style() -> PackedDataset:
    return PackedDataset(ROWS, max_seq_len=64)


PAIR = {"prompt": "a", "chosen": "b" * 61, "rejected": "c"}

FORGOTTEN = "call prepare_trainer_for_packing(trainer) before it trains or evaluates"
COLUMNS = "set remove_unused_columns=False in TrainingArguments"


def flattening() -> Any:
    from transformers import DataCollatorWithFlattening

    return DataCollatorWithFlattening()


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    # Files and rows.
    "no file": (
        lambda: first("data/*.jsonl"),
        "no file matches 'data/*.jsonl'; check the path or the glob",
    ),
    "array": (
        lambda: of_text('[{"text": "a"}]'),
        "rows.jsonl:1: it is a JSON array: let its name end in .json",
    ),
    "text file": (
        lambda: of_text("hello world\n"),
        "if it is text, TextSource('rows.jsonl'); if it is CSV, let datasets read it: HFSource('csv', data_files=",
    ),
    "latin-1": (
        lambda: of_text('{"text": "é"}\n'.encode("latin-1")),
        "JSON is UTF-8: convert the file",
    ),
    "all splits": (
        lambda: first(of_datasets([{"input_ids": [5]}])),
        "a DatasetDict has several splits: 'train'; give one, such as dataset['train']",
    ),
    # Tokenizers and samples.
    "no encoder": (
        lambda: of_file('{"text": "a"}\n'),
        "rows.jsonl:1: column 'tokens' is missing; the row's columns are 'text'; rows of text or messages need "
        "an encoder: encoder=TextEncoder(tokenizer) or ChatEncoder(tokenizer), data.encoder in a config; ids under",
    ),
    "a tokenizer": (
        lambda: packs([{"text": "a"}], encoder=byte_level()),
        "encoder is a TokenizersBackend; give an encoder, such as TextEncoder(tokenizer) for rows of text",
    ),
    "pairs": (
        lambda: first([PAIR]),
        "the row is a preference pair ('chosen', 'rejected'), whose answers must stay in one pack; such rows need an "
        "encoder: encoder=AnswersEncoder(tokenizer)",
    ),
    "long pair": (
        lambda: first([PAIR], encoder=AnswersEncoder(byte_level())),
        "sample 0 is a group of 65 tokens, max_seq_len is 64, and a group is never split; set overlong to 'truncate'",
    ),
    "bare text": (
        lambda: first(["hello"], encoder=TextEncoder(byte_level())),
        "sample 0: the row is a str, 'hello'; it must be a dict with a column 'text'",
    ),
    "column": (
        lambda: of_text('{"content": "a"}\n'),
        "rows.jsonl:1: column 'text' is missing; the row's columns are 'content'; the encoder's option column= names",
    ),
    "empty": (
        lambda: first([{"input_ids": []}]),
        "sample 0: it has no token; mend the row, or leave it out (skip_bad: True)",
    ),
    "no content": (
        lambda: first(
            [{"messages": [{"role": "user", "content": None}]}], encoder=streampack.ChatEncoder(byte_level())
        ),
        "column 'messages', message 0 (user) has no content (null) and no tool_calls; mend the row, or leave it out",
    ),
    "overlong": (
        lambda: first([{"input_ids": [5] * 100}]),
        "sample 0 has 100 tokens, max_seq_len is 64; set overlong to 'split', 'truncate' or 'drop', or raise",
    ),
    "vocabulary": (
        lambda: first([{"input_ids": [5, 2000]}], vocab_size=1000),
        "sample 0: token id 2000 is outside the vocabulary of 1000 ids (0 to 999); use the model's own tokenizer",
    ),
    "labels": (
        lambda: first([{"input_ids": [5, 6, 7], "labels": [6, 7]}]),
        "sample 0: 'input_ids' has 3 entries and 'labels' has 2; labels are unshifted, one per token",
    ),
    "columns of ids": (
        lambda: first([{"ids": [1, 2], "n": 2}]),
        "name need TokensEncoder(tokens=COLUMN, labels=COLUMN or None)",
    ),
    # Datasets and loaders.
    "strategy": (
        lambda: packs(ROWS, strategy="bfd"),
        "strategy='bfd' is unknown; choose one of 'next_fit', 'first_fit', 'best_fit', 'exact_fit', 'padded'; for "
        "documents that continue in the next pack set split_across_pack=True",
    ),
    "shuffle as text": (
        lambda: packs(ROWS, shuffle="no"),
        "shuffle='no' is text; give True, False, 'auto' or a number of rows",
    ),
    "split_across_pack as text": (
        lambda: packs(ROWS, split_across_pack="no"),
        "split_across_pack='no' is text; give True or False",
    ),
    "rows to the loader": (
        lambda: PackedDataLoader(ROWS),  # type: ignore[arg-type]
        "a list is no stream of packs; give PackedDataLoader an IterablePackedDataset(rows, max_seq_len=...)",
    ),
    "a strategy that would mean nothing": (
        lambda: packs(ROWS, split_across_pack=True, strategy="exact_fit"),
        "strategy='exact_fit' has no effect with split_across_pack=True, which fills packs in the order of arrival;",
    ),
    "a million lanes": (
        lambda: packs(ROWS, num_lanes=10**6),
        "num_lanes=1000000 is above the limit of 65,536; give a small multiple of the ranks that you may use",
    ),
    "more lanes than rows": (
        lambda: packs(ROWS * 1500, num_lanes=60_000),
        "num_lanes=60000 is more than the 13,500 rows of the data, so most lanes would be empty; give 13,500 or fewer",
    ),
    "a million lanes of token shards": (
        lambda: tokenize(ROWS, out="nowhere", lanes=10**6),
        "lanes=1000000 is above the limit of 65,536; give a small multiple of the",
    ),
    "lanes": (
        lambda: packs(ROWS, num_lanes=1).lanes_for(2),
        "num_lanes=1 gives 1 of 2 ranks nothing to read; in a new run, set num_lanes=2 or a",
    ),
    "no state": (
        lambda: PackedDataLoader(packs(ROWS)).load_state_dict({}),
        "this dict is no state of an IterablePackedDataset (format 7); give what loader.state_dict() returned",
    ),
    "a tensor for a format": (
        lambda: PackedDataLoader(packs(ROWS)).load_state_dict({"version": torch.zeros(2), "lanes": {}}),
        "this dict is no state of an IterablePackedDataset (format 7); give what loader.state_dict() returned",
    ),
    "a state of another release": (
        lambda: PackedDataLoader(packs(ROWS)).load_state_dict({"version": 4, "lanes": {}}),
        "this state has format 4, of another release of streampack; this one reads format 7: continue with the release",
    ),
    "other data": (
        lambda: resumed(rows=11),
        "the state was made with corpus.rows=9 and this dataset has corpus.rows=11; resume with what the run began",
    ),
    "other settings": (
        lambda: resumed(max_seq_len=128),
        "the state was made with max_seq_len=64 and this dataset has max_seq_len=128",
    ),
    "dataset's key": (lambda: packs(ROWS, shufle=True), "got an unexpected keyword argument 'shufle'"),
    "storage's key": (
        lambda: JSONLSource("a.jsonl", storage={"time_out": 1}),
        "storage got an unexpected keyword argument 'time_out'; did you mean 'timeout'",
    ),
    "outage": (lambda: Storage(max_outage=-1), "max_outage=-1"),
    "weight": (
        lambda: Mix([{"name": "a", "source": MapSource(ROWS), "weight": 10**400}]),
        "; give its fraction of the trained tokens",
    ),
    # Models and Trainer.
    "attention": (
        lambda: prepare_model_for_packing(hf_trainers.model(), attention="flash_attention_2"),
        "'flash'; did you mean 'flash'",
    ),
    "unprepared": (lambda: unprepared(packs(ROWS, epochs=None)), FORGOTTEN),
    "unprepared, flat rows": (
        lambda: unprepared(packs(ROWS, epochs=None), data_collator=flattening(), remove_unused_columns=False),
        FORGOTTEN,
    ),
    "unprepared evaluation": (
        lambda: hf_trainers.trainer_of(Path(), eval_dataset=hf_trainers.held_out()).evaluate(),
        FORGOTTEN,
    ),
    "Trainer's collator": (
        lambda: unprepared(map_style()),
        f"data_collator=FlatteningCollator() and {COLUMNS}",
    ),
    "Trainer's columns": (lambda: unprepared(map_style(), data_collator=FlatteningCollator()), COLUMNS),
    "columns of samples": (
        lambda: unprepared(hf_trainers.samples(60), data_collator=FlatteningCollator()),
        "sample 0 of the batch: it has no ",
    ),
    "model's vocabulary": (
        lambda: trained([{"input_ids": [5, 99_999]}] * 9),
        "token id 99999 is outside the model's vocabulary of 1024 ids (0 to 1023); use the model's own tokenizer, or",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.filterwarnings("ignore")
def test_a_mistake_is_named_with_its_way_out(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    make, fragment = REFUSED[name]
    with pytest.raises((ValueError, TypeError, OSError)) as error:
        make()
    assert fragment in str(error.value).replace(f"{tmp_path}/", "").replace(str(tmp_path), "HERE")


@pytest.mark.parametrize(
    ("package", "open_door", "extra"),
    [
        ("pyarrow", lambda: first("rows.parquet"), "reading Parquet needs pyarrow: pip install 'streampack[data]'"),
        ("torchtune", lambda: main(["validate", "quickstart"]), "pip install 'streampack[tune]'"),
    ],
    ids=["pyarrow", "torchtune"],
)  # fmt: skip
def test_a_package_that_is_missing_is_named_by_its_extra(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    package: str,
    open_door: Callable[[], Any],
    extra: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("rows.parquet").write_bytes(b"PAR1")
    monkeypatch.setitem(sys.modules, package, None)
    try:
        open_door()
        said = capsys.readouterr().err
    except ImportError as error:
        said = str(error)
    assert extra in said


@pytest.mark.parametrize(
    ("settings", "fragment"),
    [
        ({"padding_idx": 10}, "padding_idx=10 is outside the vocabulary of 10 ids (0 to 9); give a token of the"),
        ({"padding_idx": True}, "padding_idx=True is not a whole number; give one of at least 0"),
        ({"eos_id": -1}, "eos_id=-1 is below 0; give at least 0"),
    ],
)  # fmt: skip
def test_token_ids_are_checked_against_the_vocabulary(settings: Any, fragment: str) -> None:
    given = {"max_seq_len": 6, "vocab_size": 10, **settings}
    makers: list[Callable[[], Any]] = [lambda: PackedDataset(ROWS, **given)]
    if "eos_id" in settings:
        makers.append(lambda: TokensEncoder(**settings))
    else:
        makers.append(lambda: packs(ROWS, **given))
        makers.append(lambda: method_loader(ROWS, method="exact_fit", batch_size=1, **given))
    for make in makers:
        with pytest.raises(ValueError) as error:
            make()
        assert str(error.value).startswith(fragment)


NOWHERE = "https://nowhere.invalid/a.jsonl"


@pytest.mark.parametrize("number", [2**63, 10**400], ids=["64 bits", "no float"])
@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("max_seq_len", lambda n: packs(ROWS, max_seq_len=n)),
        ("max_outage", lambda n: Storage(max_outage=n)),
        ("batch_size", lambda n: PackedDataLoader(packs(ROWS), batch_size=n)),
        ("max_tokens", lambda n: MultipackBatchSampler([1, 2], max_tokens=n)),
        ("timeout", lambda n: Storage(timeout=n)),
    ],
)
def test_numbers_that_no_machine_can_hold_are_refused_by_name(name: str, make: Any, number: int) -> None:
    with pytest.raises(ValueError, match=f"^{name}={number} is "):
        make(number)
