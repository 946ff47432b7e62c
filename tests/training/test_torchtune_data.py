"""torchtune's dataset builders as the data of a run, compared with the datasets that torchtune makes of them."""

from __future__ import annotations

import base64
import json
from collections import Counter
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torchtune.config import instantiate
from torchtune.data import padded_collate_tiled_images_and_mask
from torchtune.datasets import ConcatDataset, SFTDataset
from torchtune.datasets.multimodal import the_cauldron_transform
from torchtune.models.llama3 import llama3_tokenizer

from streampack import IterablePackedDataset, PackedDataLoader
from streampack.distributed.rank_sync import OtherRankFailed
from streampack.inspection.commands import inspect_config, print_packs  # private: the commands print these
from streampack.instantiate import build
from streampack.training.checks import read_config
from streampack.training.collated_rows import prepare_inputs
from streampack.training.config import RunConfig
from streampack.training.data import Datasets, build_datasets
from streampack.training.world import World, join_world
from streampack.types import IGNORE_INDEX
from tests.harness.processes import run_ranks
from tests.harness.threads import Topology, run
from tests.harness.tiny import tiny_config

LIMIT = 400
VOCAB = 600
TURNS = "conversations"
COLLATE = "torchtune.data.padded_collate_tiled_images_and_mask"
CPU = torch.device("cpu")

Samples = Counter[tuple[tuple[int, ...], tuple[int, ...]]]


def row(number: int) -> dict[str, Any]:
    """Return a row for every builder; every ninth is longer than the limit."""
    question, answer = f"Say {number}.", "ab cd " * (1 + number % 7 + 100 * (number % 9 == 8)) + str(number)
    asked = [{"role": "user", "content": question}]
    return {
        "instruction": question, "input": "now" * (number % 3), "output": answer, "text": answer, "sentence": question,
        TURNS: [{"from": "human", "value": question}, {"from": "gpt", "value": answer}],
        "chosen": [*asked, {"role": "assistant", "content": answer}],
        "rejected": [*asked, {"role": "assistant", "content": f"ab {number}"}],
    }  # fmt: skip


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("torchtune")
    (folder / "rows.json").write_text("".join(json.dumps(row(number)) + "\n" for number in range(60)))
    ranks = (f"{base64.b64encode(bytes([i])).decode()} {i}\n" for i in range(256))
    (folder / "tokenizer.model").write_text("".join(ranks))
    return folder


def node(place: Path, builder: str, **settings: Any) -> dict[str, Any]:
    path = f"torchtune.datasets.{builder}_dataset"
    return {
        "_component_": path,
        "source": "json",
        "data_files": str(place / "rows.json"),
        "split": "train",
    } | settings


def config_of(
    place: Path, tmp_path: Path, dataset: Any, *, limit: int | None = LIMIT, **changes: Any
) -> RunConfig:
    config = tiny_config(tmp_path, **{"validation": None, "epochs": 1} | changes)
    del config["data"]
    config.dataset = dataset
    path = "torchtune.models.llama3.llama3_tokenizer"
    config.tokenizer = {"_component_": path, "path": str(place / "tokenizer.model"), "max_seq_len": limit}
    config.model.max_seq_len = None  # as of most builders; the model's own is what counts
    return read_config(config)


def data_of(config: RunConfig, tokenizer: Any = None) -> Datasets:
    """Build the data of a config as recipes do."""
    tokenizer = tokenizer or build(config.tokenizer)
    vocab_size = tokenizer.vocab_size
    return build_datasets(
        config, tokenizer=tokenizer, vocab_size=vocab_size, world=World(), positions=4 * LIMIT
    )


def train_of(config: RunConfig) -> IterablePackedDataset:
    return data_of(config).train


def tokenizer_of(place: Path, limit: int | None = LIMIT) -> Any:
    return llama3_tokenizer(str(place / "tokenizer.model"), max_seq_len=limit)


def theirs(place: Path, dataset: Any, limit: int | None = LIMIT) -> Any:
    """Return torchtune's dataset of nodes, as its recipes build it, without packing."""
    nodes = dataset if isinstance(dataset, list) else [dataset]
    from omegaconf import OmegaConf

    built = [
        instantiate(OmegaConf.create(each | {"packed": False}), tokenizer_of(place, limit)) for each in nodes
    ]
    return ConcatDataset(built) if len(built) > 1 else built[0]


def sample(tokens: Any, labels: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return tuple(map(int, tokens)), (IGNORE_INDEX, *map(int, labels[1:]))  # nothing predicts the first


def samples_of(dataset: IterablePackedDataset) -> Samples:
    found: Samples = Counter()
    for pack in dataset:
        start = 0
        for length in pack["seq_lens"][: pack["num_seqs"]].tolist():
            here = slice(start, start + length)
            found[sample(pack["tokens"][here], pack["labels"][here])] += 1
            start += length
    return found


BUILDERS = {
    "alpaca": {},
    "alpaca_cleaned": {"train_on_input": False},
    "instruct": {"column_map": {"input": "instruction", "output": "output"}, "train_on_input": True},
    "grammar": {"column_map": {"input": "sentence", "output": "output"}},
    "chat": {"conversation_column": TURNS, "conversation_style": "sharegpt"},
    "text_completion": {"split_across_pack": False},
}


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("builders", [*([name] for name in BUILDERS), ["chat", "alpaca"]], ids="+".join)
def test_samples_are_those_of_torchtunes_dataset_once_each(
    place: Path, tmp_path: Path, builders: list[str], packed: bool, caplog: pytest.LogCaptureFixture
) -> None:
    nodes = [node(place, name, packed=packed, **BUILDERS[name]) for name in builders]
    dataset = nodes if len(nodes) > 1 else nodes[0]
    oracle = theirs(place, dataset)
    expected = Counter(
        sample(each["tokens"], each["labels"]) for each in map(oracle.__getitem__, range(len(oracle)))
    )
    assert max(len(tokens) for tokens, _ in expected) >= LIMIT - 1, "no sample was cut"
    ours = data_of(config_of(place, tmp_path, dataset, shuffle=True)).train
    assert samples_of(ours) == expected
    said = [each.message for each in caplog.records if each.name == "streampack.training.torchtune_data"]
    assert len(said) == len(nodes)
    assert all(f"max_seq_len={LIMIT} cuts longer samples; 6 of 60 rows" in each for each in said)
    if packed:
        assert ours.lane_config.packing.max_seq_len == LIMIT


@pytest.mark.parametrize("packed", [True, False])
def test_pairs_are_those_of_torchtunes_dataset_with_the_prompt_once(
    place: Path, tmp_path: Path, packed: bool
) -> None:
    pairs = node(place, "preference")
    ours, oracle = data_of(config_of(place, tmp_path, pairs | {"packed": packed})).train, theirs(place, pairs)
    found, shared = [], 0
    for pack in ours.stream():
        groups, start, segments = pack.groups, 0, []
        assert groups is not None
        for length, parent, first in zip(pack.seq_lens, groups.parents, groups.first_labels, strict=True):
            here = slice(start, start + length)
            tokens, labels = pack.tokens[here].tolist(), [first, *pack.labels[here][1:].tolist()]
            before = segments[parent] if parent >= 0 else ([], [])
            segments.append((before[0] + tokens, before[1] + labels))
            start += length
        leaves = [each for number, each in enumerate(segments) if number not in groups.parents]
        shared += len(segments) - len(leaves)
        found += [tuple(sample(*each) for each in leaves[i : i + 2]) for i in range(0, len(leaves), 2)]
    names = ("chosen", "rejected")
    rows = [oracle[number] for number in range(len(oracle))]
    expected = [tuple(sample(each[f"{a}_input_ids"], each[f"{a}_labels"]) for a in names) for each in rows]
    assert Counter(found) == Counter(expected)
    assert shared == len(rows), "a prompt was computed twice"
    assert any(len(tokens) == LIMIT for pair in expected for tokens, _ in pair), "no answer was cut"


def test_commands_show_text_and_advise_no_keys_of_data(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dataset = node(place, "text_completion")
    config = vars(config_of(place, tmp_path, dataset, **{"model.vocab_size": 2**18}))
    print_packs(config, step=None, packs=1)
    assert "ab cd 0" in capsys.readouterr().out
    report = inspect_config(config, title="", ranks=1, rows=None, packs=1)
    assert any(advice.yaml.startswith("dataset:\n  packed: True") for advice in report.advice)
    assert not any(advice.yaml.startswith("data:") for advice in report.advice)


def test_an_answer_that_the_tokenizer_cut_off_is_kept_as_in_torchtune(place: Path, tmp_path: Path) -> None:
    """Its prompt fills the limit, so that nothing of it is trained, and both sequences are equal."""
    long = {"role": "user", "content": "ab " * LIMIT}
    row = {name: [long, {"role": "assistant", "content": name}] for name in ("chosen", "rejected")}
    path = tmp_path / "rows.json"
    path.write_text(json.dumps(row))
    pairs = node(place, "preference", data_files=str(path), packed=True)
    [pack] = data_of(config_of(place, tmp_path, pairs)).train.stream()
    assert pack.groups is not None
    assert (pack.seq_lens, pack.groups.parents) == ((LIMIT - 1, 1, 1), (-1, 0, 0))
    assert {*pack.labels.tolist(), *pack.groups.first_labels} == {IGNORE_INDEX}


def test_documents_that_are_split_across_packs_lose_no_text(place: Path, tmp_path: Path) -> None:
    """torchtune's builder splits by default, but cuts each document to the limit before."""
    texts = node(place, "text_completion", packed=True)
    ours, whole = data_of(config_of(place, tmp_path, texts)).train, theirs(place, texts, limit=None)
    documents = {number: whole[number]["tokens"] for number in range(len(whole))}
    assert max(map(len, documents.values())) > LIMIT
    found: dict[int, dict[int, list[int]]] = {number: {} for number in documents}
    packs = list(ours.stream())
    for pack in packs:
        start = 0
        for fragment in pack.fragments:
            found[fragment.row_id[0]][fragment.start] = pack.tokens[start : start + fragment.length].tolist()
            assert pack.labels[start] == IGNORE_INDEX, "another document predicts its first token"
            start += fragment.length
    whole_again = {n: [i for at in sorted(each) for i in each[at]] for n, each in found.items()}
    assert whole_again == documents
    full = sum(sum(pack.seq_lens) == LIMIT for pack in packs)
    assert full >= len(packs) - ours.lanes_for(1)


def test_what_a_builder_does_wrong_is_one_line_with_the_key_and_the_way_out(
    place: Path, tmp_path: Path
) -> None:
    path = "torchtune.datasets.multimodal.the_cauldron_dataset"
    chat = BUILDERS["chat"]
    for dataset, limit, said in [
        (node(place, "alpaca", packed=True), None, "dataset.packed=True needs the length of a pack"),
        (node(place, "alpaca"), 5 * LIMIT, r"tokenizer.max_seq_len=2000 is above the model's 1600 positions"),
        (node(place, "alpaca", data_files="none.json"), LIMIT, r"dataset: .*none.json.*; a file of your own is"),
        (node(place, "alpaca", split="test"), LIMIT, r"dataset: .*split \"test\"[^;]*$"),
        (node(place, "alpaca", column_map={"output": "none"}), LIMIT, r"dataset: .*: the first row: .*'none'; map"),
        (node(place, "chat", conversation_column="none", conversation_style="openai"), LIMIT, "dataset: .*'none'; map"),
        (node(place, "chat", conversation_column=TURNS, conversation_style="none"), LIMIT, r"dataset: .*style: none"),
        (node(place, "text_completion", streaming=True), LIMIT, r"dataset: .* streaming=True; remove it"),
        ([node(place, "alpaca", packed=True), node(place, "chat", **chat)], LIMIT, "some of its nodes"),
        ([node(place, "chat", **chat), node(place, "preference")], LIMIT, r"dataset: .*pairs"),
        ([node(place, "text_completion", packed=True), node(place, "chat", packed=True, **chat)], LIMIT, "split_acr"),
        ({"_component_": path, "packed": True}, LIMIT, r"dataset: .* padded only; set packed: False"),
    ]:  # fmt: skip
        with pytest.raises(ValueError, match=said) as error:
            data_of(config_of(place, tmp_path, dataset, limit=limit))
        assert "\n" not in str(error.value)


def said_on_each_rank(config: RunConfig, wrong: dict[str, Any]) -> list[str]:
    """Build the data of a config on two ranks; each in turn has wrong settings."""
    said, plain = [], config.dataset
    for bad in range(2):
        with pytest.raises((ValueError, OtherRankFailed)) as error, join_world(CPU) as world:
            config.dataset = plain | (wrong if world.rank == bad else {})
            build_datasets(config, tokenizer=build(config.tokenizer), vocab_size=None, world=world)
        said.append(f"{error.value}")
    return said


@pytest.mark.parametrize(("wrong", "reason"), [
    ({"data_files": "none.json"}, "Unable to find"), ({"column_map": {"output": "none"}}, "the first row: "),
])  # fmt: skip
def test_what_one_rank_cannot_read_is_said_on_all(
    place: Path, tmp_path: Path, wrong: dict[str, Any], reason: str
) -> None:
    """And not waited for until the timeout, 600 s."""
    config = config_of(place, tmp_path, node(place, "alpaca"))
    for rank, said in enumerate(run_ranks(said_on_each_rank, 2, config, wrong)):
        for bad, each in enumerate(said):
            assert reason in each
            assert each.startswith(
                "dataset: " if rank == bad else f"rank {bad} failed: ValueError: dataset: "
            )


def test_a_bad_row_ends_no_run_before_it_is_read(place: Path, tmp_path: Path) -> None:
    rows = [json.dumps(row(number) | ({"output": None} if number == 40 else {})) for number in range(60)]
    (tmp_path / "rows.json").write_text("\n".join(rows))
    dataset = node(place, "alpaca", packed=True, data_files=str(tmp_path / "rows.json"))
    ours = data_of(config_of(place, tmp_path, dataset)).train
    with pytest.raises(ValueError, match="sample 40"):
        list(ours.stream())


# Batches that a config's collate_fn makes.


class Pictures:
    """What a model transform of torchtune's makes of rows with one or two images of several tiles."""

    def __len__(self) -> int:
        return 11

    def __getitem__(self, number: int) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(number)
        tiles, tokens = [1 + (number + i) % 3 for i in range(1 + number % 2)], [7] * (3 + 5 * number % 13)
        return {
            "tokens": tokens,
            "mask": [True, *[False] * (len(tokens) - 1)],
            "labels": [IGNORE_INDEX, *tokens[1:]],
            "encoder_input": {
                "images": [torch.rand(n, 3, 4, 4, generator=generator) for n in tiles],
                "aspect_ratio": [torch.tensor([1, n]) for n in tiles],
            },
            "encoder_mask": [torch.ones(len(tokens), 5 * n, dtype=torch.bool) for n in tiles],
        }


def pictures(model_transform: Any) -> Pictures:
    """Return a builder's dataset, as a user's own module may have one."""
    return Pictures()


PICTURES = {"_component_": f"{__name__}.pictures"}


@pytest.mark.parametrize("workers", [0, 1])
def test_batches_of_images_are_those_of_the_configs_collate_fn(
    place: Path, tmp_path: Path, workers: int
) -> None:
    """On two ranks, with a resume on one: each row once, and null packs run the model on a row that trains nothing."""
    settings = {"limit": None, "collate_fn": COLLATE, "shuffle": True}
    make = partial(train_of, config_of(place, tmp_path, PICTURES, **settings))
    begun = run(make, Topology(2, workers, batch_size=2), limit=2)
    ended = run(make, Topology(1, workers, batch_size=4), state=begun.states[0], packs_per_step=4)
    batches = [batch for made in (begun, ended) for of_rank in made.batches for batch in of_rank]
    rows, pad = Pictures(), tokenizer_of(place).pad_id
    seen, nulls = [], 0
    for batch in batches:
        numbers = [fragments[0].row_id[0] for fragments in batch.fragments if fragments]
        seen += numbers
        nulls += len(batch.fragments) - len(numbers)
        assert batch.extra is not None
        assert len(batch.tokens) == len(batch.fragments)
        if len(numbers) < len(batch.fragments):
            empty = [number for number, each in enumerate(batch.fragments) if not each]
            assert (batch.labels[empty] == IGNORE_INDEX).all()
            assert batch.extra["encoder_input"]["images"][empty].any()
            continue
        expected = padded_collate_tiled_images_and_mask(
            [rows[number] for number in numbers], pad, IGNORE_INDEX
        )
        for name, value in {"tokens": batch.tokens, "labels": batch.labels, **batch.extra}.items():
            torch.testing.assert_close(value, expected[name], rtol=0, atol=0)
        assert batch.seq_lens[:, 0].tolist() == [len(rows[number]["tokens"]) for number in numbers]
    assert sorted(seen) == list(range(len(rows)))
    assert nulls
    # Runs are compared without pixels, whose last bits differ between machines, and which take megabytes a row.
    examples = make().lane_config.source.examples(3)
    assert [sorted(each.data) for each in examples] == [["labels", "tokens"]] * len(examples) != []


def test_a_model_of_images_gets_the_collated_inputs_in_its_dtype(place: Path, tmp_path: Path) -> None:
    """As torchtune's recipes call it, but that pixels of the transform's bf16 suit a model in fp32."""
    config = SimpleNamespace(collate_fn=COLLATE, attention="auto")
    inputs = prepare_inputs(torch.nn.Linear(2, 2), config)  # type: ignore[arg-type]
    train = data_of(config_of(place, tmp_path, PICTURES, limit=None, collate_fn=COLLATE)).train
    batch = next(iter(PackedDataLoader(train, batch_size=2)))
    assert batch.extra is not None
    batch.extra["encoder_input"]["images"] = batch.extra["encoder_input"]["images"].bfloat16()
    made = inputs(batch.to("cpu"))
    assert sorted(made) == ["encoder_input", "encoder_mask", "tokens"]
    assert made["encoder_input"]["images"].dtype == torch.float32
    assert made["encoder_mask"].dtype == torch.bool


def test_a_collate_fn_that_cannot_train_is_refused(place: Path, tmp_path: Path) -> None:
    chat = node(place, "chat", **BUILDERS["chat"])
    for dataset, name, said in [
        (PICTURES, None, "dataset: .* has images; set collate_fn: .*packed: False"),
        (PICTURES, "torchtune.data.left_pad_sequence", "collate_fn=.* is for inference only"),
        (chat | {"packed": True}, COLLATE, "collate_fn=.* is for padded samples"),
        (chat, "torchtune.data.padded_colate", "collate_fn: .*padded_colate.* is not among"),
        (chat, COLLATE, "collate_fn cannot take the first row: .*'encoder_input'"),
    ]:
        with pytest.raises(ValueError, match=said) as error:
            data_of(config_of(place, tmp_path, dataset, collate_fn=name))
        assert "\n" not in str(error.value)


# Several datasets.


def test_several_datasets_are_read_by_weight_through_their_transforms(place: Path, tmp_path: Path) -> None:
    """As in torchtune's dev/11B_lora_multi_dataset: each row at least once, trained tokens by weight."""
    datasets = []
    for weight, name in ((3.0, "short"), (1.0, "long")):
        texts = [
            {"texts": [{"user": f"{name} {n}?", "assistant": name * (1 + n % 3)}], "images": []}
            for n in range(30)
        ]
        (tmp_path / f"{name}.json").write_text("".join(json.dumps(each) + "\n" for each in texts))
        transform = {"_component_": "torchtune.datasets.multimodal.the_cauldron_transform"}
        data = {"source": "json", "data_files": str(tmp_path / f"{name}.json"), "split": "train"}
        datasets.append(data | {"subset": name, "transform": transform, "weight": weight})
    loader = {
        "shuffle": True,
        "num_workers": 0,
        "pin_memory": True,
        "parallel_method": "thread",
        "packed": False,
    }
    config = tiny_config(tmp_path, validation=None, epochs=1, datasets=datasets, dataloader=loader)
    del config["data"]
    train = data_of(read_config(config), tokenizer_of(place)).train
    expected: Samples = Counter()
    for each in datasets:
        whole = SFTDataset(
            source="json", data_files=each["data_files"], split="train", name=each["subset"],
            message_transform=the_cauldron_transform(), model_transform=tokenizer_of(place),
        )  # fmt: skip
        expected.update(
            sample(row["tokens"], row["labels"]) for row in map(whole.__getitem__, range(len(whole)))
        )
    found = samples_of(train)
    assert found.keys() == expected.keys()
    stats = train.source_stats()
    assert list(stats) == ["0_short", "1_long"]
    trained = stats["0_short"].trained / sum(each.trained for each in stats.values())
    assert trained == pytest.approx(0.75, abs=0.03)
    for changes, said in [
        ({"dataset": PICTURES}, "datasets and dataset are two answers"),
        ({"dataloader": {"batch_sampler": 1}}, "dataloader.batch_sampler is not used"),
        ({"datasets": None}, "dataloader needs datasets"),
    ]:
        with pytest.raises(ValueError, match=said):
            read_config({**config, **changes})


# Resume, ranks, validation.


@pytest.mark.parametrize("packed", [True, False])
def test_a_resume_on_other_ranks_reads_each_row_once(place: Path, tmp_path: Path, packed: bool) -> None:
    rows = node(place, "chat", packed=packed, **BUILDERS["chat"])
    make = partial(train_of, config_of(place, tmp_path, rows, shuffle=True, seed=3))
    begun = run(make, Topology(2, batch_size=2), limit=3)
    ended = run(make, Topology(1, batch_size=4), state=begun.states[0], packs_per_step=4)
    seen = [
        fragment.row_id[0]
        for made in (begun, ended)
        for of_rank in made.batches
        for batch in of_rank
        for pack in batch.fragments
        for fragment in pack
    ]
    assert Counter(seen) == Counter(range(60))
    assert seen != sorted(seen), "nothing was shuffled"


def test_validation_rows_come_from_a_builder_or_a_fraction(place: Path, tmp_path: Path) -> None:
    train, held = (
        node(place, "text_completion", packed=False),
        node(place, "chat", packed=True, **BUILDERS["chat"]),
    )
    built = data_of(config_of(place, tmp_path, train, dataset_val=held))
    oracle = theirs(place, held)
    expected = Counter(
        sample(each["tokens"], each["labels"]) for each in map(oracle.__getitem__, range(len(oracle)))
    )
    assert samples_of(built.held_out[""]) == expected
    built = data_of(config_of(place, tmp_path, train, validation={"fraction": 0.3}))
    parts = [samples_of(each) for each in (built.train, built.held_out[""])]
    assert all(parts)
    oracle = theirs(place, train)
    expected = Counter(
        sample(each["tokens"], each["labels"]) for each in map(oracle.__getitem__, range(len(oracle)))
    )
    assert parts[0] + parts[1] == expected
