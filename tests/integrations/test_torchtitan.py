"""The data loader for torchtitan's trainer, by itself; `make test-torchtitan` runs this.

torchtitan is no part of the environment of the other tests.
"""

from __future__ import annotations

import warnings
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from streampack import AnswersEncoder, IterablePackedDataset, PackedDataLoader
from tests.harness.corpus import Numbers, rows
from tests.harness.hf_tokenizers import byte_level
from tests.harness.processes import run_forked

pytest.importorskip("torchtitan", reason="needs torchtitan: make test-torchtitan")
pytestmark = pytest.mark.filterwarnings("ignore")  # of torchtitan and what it imports
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import torch.distributed.checkpoint as dcp
    import tyro

    from streampack.integrations.torchtitan import StreampackDataLoader

SEQ_LEN = 24
EOS = 7


class Tokenizer:
    """A tokenizer with the methods of torchtitan's that the loader uses; a byte is a token."""

    eos_id = EOS

    def encode(self, text: str, *, add_bos: bool, add_eos: bool) -> list[int]:
        return [*text.encode(), *[EOS] * add_eos]


TOKENIZER = Tokenizer()


def config(count: int = 120, **changes: Any) -> StreampackDataLoader.Config:
    settings = {"buffer_size": 8, "num_lanes": 4, "shuffle": True, "seed": 3, **changes.pop("settings", {})}
    given = {"source": rows(count), "encoder": Numbers(), "infinite": False, **changes}
    return StreampackDataLoader.Config(settings=settings, **given)


def build(
    made: StreampackDataLoader.Config, *, dp_rank: int = 0, dp_world_size: int = 1, batch: int = 2
) -> Any:
    return made.build(
        dp_world_size=dp_world_size,
        dp_rank=dp_rank,
        tokenizer=TOKENIZER,
        seq_len=SEQ_LEN,
        local_batch_size=batch,
        snapshot_every_n_steps=5,
    )


def content(batches: Any) -> list[Any]:
    return [
        (inputs["input"].tolist(), inputs["positions"].tolist(), labels.tolist())
        for inputs, labels in batches
    ]


def by_hand(**settings: Any) -> list[Any]:
    """The batches of the same packs, with labels and positions of each sequence by itself."""
    packs = IterablePackedDataset(
        rows(120), encoder=Numbers(), max_seq_len=SEQ_LEN, padding_idx=EOS, buffer_size=8, num_lanes=4,
        shuffle=True, seed=3, **settings,
    )  # fmt: skip
    batches = []
    for batch in PackedDataLoader(packs, batch_size=2):
        whole = []
        for tokens, labels, lengths in zip(
            batch.tokens.tolist(), batch.labels.tolist(), batch.seq_lens.tolist(), strict=True
        ):
            positions, targets, start = [], [], 0
            for length in lengths:
                positions += range(length)
                targets += [*labels[start + 1 : start + length], -100] if length else []
                start += length
            whole.append((tokens, positions, targets))
        batches.append(tuple(map(list, zip(*whole, strict=True))))
    return batches


def test_batches_are_the_packs_with_labels_shifted_within_each_sequence() -> None:
    found = content(build(config()))
    assert found == by_hand()
    tokens, positions, labels = found[0]
    assert sum(position == 0 for position in positions[0]) > 1, "several sequences share the pack"
    assert all(row[-1] == -100 for row in labels)
    predicted = [
        (token + 1, label)
        for row, targets in zip(tokens, labels, strict=True)
        for token, label in zip(row, targets, strict=True)
        if label != -100
    ]
    assert predicted, "something is trained"
    assert all(following == label for following, label in predicted), "tokens of a row of Numbers count up"


def test_padding_is_a_document_of_its_own_with_the_tokenizers_eos() -> None:
    [*_, (inputs, labels)] = build(config(7, settings={"num_lanes": 1, "shuffle": False}), batch=4)
    null = inputs["input"][-1]  # fills the batch up
    assert null.tolist() == [EOS] * SEQ_LEN
    assert inputs["positions"][-1].tolist() == list(range(SEQ_LEN))
    assert (labels[inputs["input"] == EOS] == -100).all()


def test_a_state_resumes_after_any_batch() -> None:
    whole = content(build(config()))
    for cut in range(len(whole) + 1):
        loader = build(config())
        batches = iter(loader)
        begun = content(next(batches) for _ in range(cut))
        state = loader.state_dict()
        resumed = build(config(num_workers=cut % 2))
        resumed.state_dict()  # as DCP asks for it, for the keys
        resumed.load_state_dict(state)
        assert begun + content(resumed) == whole


def read(folder: Path, made: StreampackDataLoader.Config, steps: int | None, save: str, load: str) -> Any:
    """Load, read some steps of 4 packs over all ranks, save: by torch.distributed.checkpoint, as torchtitan does."""
    rank, size = dist.get_rank(), dist.get_world_size()
    loader = build(made, dp_rank=rank, dp_world_size=size, batch=4 // size)
    if load:
        dcp.load({"dataloader": loader}, checkpoint_id=folder / load)
    batches = iter(loader)
    if steps is None:
        found = content(batches)
    else:
        found = content(next(batches) for _ in range(steps))
    if save:
        dcp.save({"dataloader": loader}, checkpoint_id=folder / save)
    return found


def steps_of(outcomes: list[Any]) -> list[Any]:
    """The packs of each step, of all ranks, sorted; without null packs."""
    return [
        sorted(tokens for part in parts for tokens in part[0] if any(token != EOS for token in tokens))
        for parts in zip(*outcomes, strict=True)
    ]


def test_a_checkpoint_of_two_ranks_resumes_on_one_and_on_four(tmp_path: Path) -> None:
    made = config(400)
    whole = steps_of(_run(1, tmp_path, made, None))
    cut, later = (
        5,
        14,
    )  # before any lane ends, from where on the packs of a step depend on the number of ranks
    assert steps_of(_run(2, tmp_path, made, cut, save="two")) == whole[:cut]
    assert steps_of(_run(1, tmp_path, made, None, load="two")) == whole[cut:]
    assert steps_of(_run(4, tmp_path, made, later - cut, load="two", save="four")) == whole[cut:later]
    rest = steps_of(_run(2, tmp_path, made, None, load="four"))
    assert sorted(chain.from_iterable(rest)) == sorted(chain.from_iterable(whole[later:]))


def test_ranks_that_do_not_divide_the_lanes_are_refused(tmp_path: Path) -> None:
    """torchtitan counts batches: a step would train fewer packs than on one rank."""
    made = config(settings={"num_lanes": 1})
    _run(1, tmp_path, made, 3, save="one")
    later = replace(made, settings={**made.settings, "num_lanes": None})
    for outcome in run_forked(refused, 2, tmp_path, later):
        assert "2 data-parallel ranks do not divide the num_lanes=1 of the run" in outcome


def refused(folder: Path, made: StreampackDataLoader.Config) -> str:
    try:
        read(folder, made, 1, "", "one")
    except ValueError as error:
        return str(error)
    return "read"


def _run(size: int, folder: Path, made: Any, steps: int | None, *, save: str = "", load: str = "") -> Any:
    return run_forked(read, size, folder, made, steps, save, load)


def grouped(made: StreampackDataLoader.Config) -> list[Any]:
    rank = dist.get_rank()
    return content(build(made, dp_rank=rank // 2, dp_world_size=2))


def test_ranks_of_one_dp_rank_get_the_same_batches_and_all_make_as_many() -> None:
    one, same, two, also = run_forked(grouped, 4, config(70))
    assert one == same
    assert two == also
    assert len(one) == len(two)
    assert steps_of([one, two]) == steps_of([content(build(config(70), batch=4))])


def failing(made: StreampackDataLoader.Config) -> tuple[int, str]:
    rank = dist.get_rank()
    found = 0
    try:
        for _ in build(made, dp_rank=rank, dp_world_size=2):
            found += 1
    except Exception as error:
        return found, str(error)
    return found, ""


def test_an_error_on_one_rank_is_raised_on_all() -> None:
    encoder = Numbers()
    encoder.bad = 90
    outcomes = run_forked(failing, 2, config(encoder=encoder))
    (counts, messages) = zip(*outcomes, strict=True)
    assert counts[0] == counts[1]
    assert all("cannot be encoded" in message for message in messages)


def validations(made: StreampackDataLoader.Config, count: int) -> tuple[list[Any], int]:
    """The batches of each validation, of which some are left in the middle, and the process groups there are then."""
    found = []
    for number in range(count):
        batches = iter(build(made, dp_rank=dist.get_rank(), dp_world_size=2))
        found.append(content(next(batches) for _ in range(3 + number % 2)))
    return found, len(dist.distributed_c10d._world.pg_map)


@pytest.mark.parametrize("infinite", [True, False])
def test_each_validation_reads_the_same_and_keeps_no_more_connections(infinite: bool) -> None:
    ((once, groups), _) = run_forked(validations, 2, config(infinite=infinite), 1)
    ((found, same), _) = run_forked(validations, 2, config(infinite=infinite), 4)
    assert [batches[:3] for batches in found] == once * 4
    assert same == groups


def test_nodes_are_built_with_torchtitans_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"body": "abc"}\n{"body": "de"}\n')
    made = StreampackDataLoader.Config(
        source={"_component_": "streampack.JSONLSource", "paths": str(tmp_path / "*.jsonl")},
        encoder={"_component_": "streampack.TextEncoder", "column": "body", "add_bos": False},
        infinite=False,
    )
    [(inputs, _)] = build(made, batch=1)
    assert inputs["input"][0, :7].tolist() == [*b"abc", EOS, *b"de", EOS]


def test_rows_of_a_published_shape_need_no_encoder() -> None:
    source = [{"question": "abc" * n, "answer": "de"} for n in range(1, 6)]
    names = {"question": "prompt", "answer": "completion"}
    made = config(source=source, encoder=None, settings={"columns": names})
    given = [{"prompt": row["question"], "completion": row["answer"]} for row in source]
    named = config(source=given, encoder={"_component_": "streampack.ChatEncoder"})
    assert content(build(made)) == content(build(named))
    with pytest.raises(ValueError, match="columns is for rows whose encoder is found by their shape"):
        build(config(settings={"columns": names}))


def test_the_command_line_sets_numbers_and_leaves_objects() -> None:
    made = config(settings={"vocab_size": 99, "mine": Tokenizer()})
    found = tyro.cli(StreampackDataLoader.Config, default=made, args=["--num_workers", "3"])
    assert (found.source, found.encoder, found.settings) == (made.source, made.encoder, made.settings)
    assert found.num_workers == 3


def test_torchtitans_log_of_a_config_reads_no_rows() -> None:
    class Stored(list[Any]):
        def to_dict(self) -> Any:  # as a Dataset of Hugging Face has
            raise AssertionError("reads all rows")

    shown = config(source=Stored(rows(9))).to_dict()
    assert "MapSource" in shown["source"]
    assert config(source="corpus/*.jsonl").to_dict()["source"] == "corpus/*.jsonl"


def test_only_a_source_says_what_the_data_is() -> None:
    with pytest.raises(ValueError, match="dataloader has source=None and, .* give .* only a source"):
        config(source=None)
    with pytest.raises(ValueError, match="for torchtitan's own loaders, {'dataset': 'c4', .* only a source"):
        config(dataset="c4")


def test_settings_that_other_fields_decide_are_refused() -> None:
    for name in ("max_seq_len", "epochs"):
        with pytest.raises(TypeError, match=f"multiple values for keyword argument '{name}'"):
            build(config(settings={name: 9}))


def test_a_state_of_another_loader_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"keys \['dp_rank_0', 'world_size'\].*exclude_from_loading dataloader"
    ):
        build(config()).load_state_dict({"dp_rank_0": b"", "world_size": 1})


def test_answers_that_share_a_prompt_are_refused() -> None:
    encoder = AnswersEncoder(byte_level())
    answers = [{"prompt": "one two", "completions": ["three", "four"]}] * 3
    made = config(source=answers, encoder=encoder, settings={"num_lanes": 1})
    with pytest.raises(ValueError, match="share a prompt.*share_prefix=False"):
        list(build(made))
