"""lm-evaluation-harness with our model class has the figures of its class ``hf``; `make test-eval` runs this."""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.harness.hf_models import build
from tests.harness.hf_tokenizers import byte_level

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("lm_eval") is None, reason="lm_eval is not installed"),
    pytest.mark.filterwarnings("ignore"),  # of the harness and what it imports
]
ROOT = Path(__file__).resolve().parents[2]
WORDS = ["one", "two", "three", "this", "is", "a", "test", "what", "the", "sky", "blue", "of", "and"]
MAX_LENGTH = 64
TASKS = ("choices", "texts", "answers")


def write_model(folder: Path, family: str = "llama", **changes: Any) -> str:
    """Save a model in fp32 and its tokenizer; return the path."""
    tokenizer = byte_level(bos_by_itself=True)
    sizes = {
        "vocab_size": len(tokenizer), "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": MAX_LENGTH,
        "bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id,
    }  # fmt: skip
    model: Any = build(family, **sizes | changes)
    model.to(torch.float32).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def words(rng: random.Random, least: int, most: int) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(rng.randint(least, most)))


def write_tasks(folder: Path, *, rows: int = 12) -> str:
    """Write a task of each kind of request; return the folder. Some texts are longer than the model's context."""
    rng = random.Random(5)
    few = "'one two' is 'three'. " * 2  # all questions begin alike
    choices = []
    for i in range(rows):
        question = few + words(rng, 1, 12)
        choices.append(
            {"question": question, "options": [words(rng, 1, 4) for _ in range(4)], "answer": i % 4}
        )
    choices[1] |= {"question": few + words(rng, 90, 90)}
    choices[2] |= {"options": ["one", "two", "one", "three"]}  # of one token, and one twice
    texts = [{"text": words(rng, 1, 150 if i % 3 else 8)} for i in range(rows)]
    answers = [{"question": words(rng, 1, 20), "answer": words(rng, 1, 2)} for _ in range(rows)]
    answers[3] |= {"question": words(rng, 120, 120)}
    shared = {"dataset_path": "json", "test_split": "test", "metadata": {"version": 1.0}}
    perplexities = [{"metric": name} for name in ("word_perplexity", "byte_perplexity", "bits_per_byte")]
    of_choices = {
        "output_type": "multiple_choice", "doc_to_text": "{{question}}", "doc_to_target": "{{answer}}",
        "doc_to_choice": "{{options}}", "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    }  # fmt: skip
    of_texts = {
        "output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "{{text}}",
        "metric_list": perplexities,
    }  # fmt: skip
    of_answers = {
        "output_type": "generate_until", "doc_to_text": "{{question}}", "doc_to_target": "{{answer}}",
        "generation_kwargs": {"until": ["\n", "the"], "max_gen_toks": 12, "do_sample": False},
        "metric_list": [{"metric": "exact_match"}, {"metric": "bleu"}],
    }  # fmt: skip
    tasks: dict[str, tuple[list[Any], dict[str, Any]]] = {
        "choices": (choices, of_choices), "texts": (texts, of_texts), "answers": (answers, of_answers)
    }  # fmt: skip
    for name, (data, task) in tasks.items():
        file = folder / f"{name}.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in data))
        config = shared | {"task": name, "dataset_kwargs": {"data_files": {"test": str(file)}}} | task
        (folder / f"{name}.yaml").write_text(json.dumps(config))  # JSON is YAML
    return str(folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("lm_eval")
    for name in ("llama", "tasks"):
        (made / name).mkdir()
    write_model(made / "llama")
    write_tasks(made / "tasks")
    return made


@pytest.fixture(autouse=True)
def offline(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", folder / "cache")


def evaluate(
    folder: Path, name: str, *, model: str = "llama", arguments: str = "", **settings: Any
) -> dict[str, Any]:
    import lm_eval
    from lm_eval.tasks import TaskManager

    import streampack.integrations.lm_eval  # noqa: F401  # registers the class

    settings = {"tasks": list(TASKS), "batch_size": 4, "device": "cpu", "bootstrap_iters": 0, **settings}
    found: dict[str, Any] = lm_eval.simple_evaluate(
        model=name,
        model_args=f"pretrained={folder / model},dtype=float32{arguments}",
        task_manager=TaskManager(include_path=str(folder / "tasks"), include_defaults=False),
        **settings,
    )
    return found


def check_same(ours: dict[str, Any], theirs: dict[str, Any], *, tasks: int = 3) -> None:
    assert ours["results"].keys() == theirs["results"].keys()
    assert len(ours["results"]) == tasks
    for task, metrics in theirs["results"].items():
        for metric, value in metrics.items():
            if isinstance(value, int | float):
                assert ours["results"][task][metric] == pytest.approx(value, rel=1e-6, abs=1e-6), (
                    task,
                    metric,
                )
        for our_row, their_row in zip(ours["samples"][task], theirs["samples"][task], strict=True):
            if task == "answers":
                assert our_row["resps"] == their_row["resps"]
            else:
                assert flat(our_row["resps"]) == pytest.approx(flat(their_row["resps"]), rel=1e-5), task


def flat(responses: Any) -> list[float]:
    """The numbers of a row's responses."""
    return [float(value) for value in torch.tensor(responses, dtype=torch.float64).flatten()]


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {}),
        ("gemma2", {"head_dim": 16, "sliding_window": 7, "query_pre_attn_scalar": 16}),
        ("gpt2", {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": MAX_LENGTH}),
        ("lfm2", {"layer_types": ["conv", "full_attention"]}),
    ],
)
def test_all_kinds_of_requests_have_the_figures_of_hf(
    folder: Path, family: str, changes: dict[str, Any]
) -> None:
    (folder / family).mkdir(exist_ok=True)
    write_model(folder / family, family, **changes)
    ours, theirs = (evaluate(folder, name, model=family) for name in ("streampack", "hf"))
    check_same(ours, theirs)
    answers = {row["filtered_resps"][0] for row in ours["samples"]["answers"]}
    assert len(answers) > 2, "the model says something"


@pytest.mark.parametrize(
    ("arguments", "settings"),
    [
        (",max_length=24", {}),
        (",add_bos_token=False", {}),
        (",prefix_token_id=5,softmax_dtype=float32", {}),
        (",truncation=True,logits_cache=False,trust_remote_code=False", {"batch_size": 1}),
        ("", {"batch_size": "auto", "tasks": ["choices", "answers"]}),
        (
            "",
            {
                "apply_chat_template": True,
                "fewshot_as_multiturn": True,
                "num_fewshot": 2,
                "tasks": ["choices"],
            },
        ),
        ("", {"gen_kwargs": "num_beams=3,do_sample=False", "tasks": ["answers"]}),
    ],
)
def test_arguments_mean_what_they_mean_to_hf(folder: Path, arguments: str, settings: dict[str, Any]) -> None:
    ours, theirs = (evaluate(folder, name, arguments=arguments, **settings) for name in ("streampack", "hf"))
    check_same(ours, theirs, tasks=len(settings.get("tasks", TASKS)))


@pytest.mark.parametrize(
    "arguments",
    [",max_seq_len=40", ",max_seq_len=4096,share_prefix=False", ",attention=dense"],
)
def test_our_own_arguments_change_no_figure(folder: Path, arguments: str) -> None:
    check_same(evaluate(folder, "streampack", arguments=arguments), evaluate(folder, "hf"))


def test_lora(folder: Path) -> None:
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    base = transformers.AutoModelForCausalLM.from_pretrained(folder / "llama")
    torch.manual_seed(0)
    wrapped = peft.get_peft_model(
        base, peft.LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    )
    wrapped.save_pretrained(folder / "adapter")
    plain, *both = (
        evaluate(folder, name, arguments=arguments)
        for name, arguments in (
            ("hf", ""),
            ("streampack", f",peft={folder / 'adapter'}"),
            ("hf", f",peft={folder / 'adapter'}"),
        )
    )
    check_same(*both)
    assert both[0]["results"]["texts"] != plain["results"]["texts"]


@pytest.fixture(scope="module")
def lm(folder: Path) -> Any:
    from streampack.integrations.lm_eval import PackedLM

    return PackedLM(str(folder / "llama"), device="cpu", dtype="float32")


def test_requests_of_one_model_share_packs(lm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rolling windows too, which the harness would hand out one at a time."""
    from lm_eval.api.instance import Instance

    calls: list[int] = []
    monkeypatch.setattr(lm, "max_seq_len", 512)
    monkeypatch.setattr(type(lm.model), "forward", counted(type(lm.model).forward, calls))
    rng = random.Random(2)
    requests = [Instance("loglikelihood_rolling", {}, (words(rng, 3, 100),), i) for i in range(20)]
    assert lm.batch_size == 1
    assert len(lm.loglikelihood_rolling(requests, disable_tqdm=True)) == 20
    assert sum(calls) > 4 * 512
    assert len(calls) <= -(-sum(calls) // 512) + 1, "full packs but the last"
    assert lm.batch_size == 1


def counted(forward: Any, calls: list[int]) -> Any:
    def count(self: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(kwargs["input_ids"].numel())
        return forward(self, *args, **kwargs)

    return functools.wraps(forward)(count)  # the signature is looked at


@pytest.mark.parametrize(
    ("family", "arguments", "message"),
    [
        (
            "llama",
            {"softmax_dtype": "bfloat16"},
            "softmax_dtype=torch.bfloat16 is not computed here, only torch.float32",
        ),
        ("llama", {"attention": "best"}, "attention='best' is unknown; choose one of"),
        ("llama", {"max_seq_len": 0}, "max_seq_len=0 is below 1; give at least 1"),
        ("t5", {}, "backend='seq2seq' cannot be packed; use --model hf"),
        ("gpt2", {"max_seq_len": 65}, "max_seq_len is 65, and this gpt2 model has 64 positions"),
        ("gemma3_text", {}, "this model cannot be packed: gemma3_text sees tokens to the right"),
    ],
)
def test_refusals(folder: Path, family: str, arguments: dict[str, Any], message: str) -> None:
    from streampack.integrations.lm_eval import PackedLM

    changes = {
        "t5": {"d_model": 64, "num_layers": 2, "num_heads": 4, "d_ff": 48},
        "gemma3_text": {"use_bidirectional_attention": True},
        "gpt2": {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": MAX_LENGTH},
    }
    (folder / "refused" / family).mkdir(parents=True, exist_ok=True)
    write_model(folder / "refused" / family, family, **changes.get(family, {}))
    with pytest.raises(ValueError) as error:
        PackedLM(str(folder / "refused" / family), device="cpu", **arguments)
    assert str(error.value).startswith(message)


def test_a_family_whose_cache_is_a_state_is_evaluated(folder: Path) -> None:
    (folder / "mamba").mkdir(exist_ok=True)
    write_model(folder / "mamba", "mamba", state_size=4)
    ours = evaluate(folder, "streampack", model="mamba", arguments=",max_length=64")
    assert ours["results"]["texts"]["bits_per_byte,none"] > 0


def command(folder: Path, *words: str, **environment: str) -> str:
    run = subprocess.run(
        [sys.executable, *words],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=540,
        check=False,
        env=os.environ
        | {
            "HF_HUB_OFFLINE": "1",
            "HF_DATASETS_CACHE": str(folder / "cache"),
            "OMP_NUM_THREADS": "1",
            **environment,
        },
    )
    assert run.returncode == 0, run.stderr[-3000:]
    return run.stdout


def settings_of(folder: Path, name: str, output: str) -> list[str]:
    return [
        *("--model", name, "--model_args", f"pretrained={folder / 'llama'},dtype=float32"),
        *("--tasks", ",".join(TASKS), "--include_path", str(folder / "tasks"), "--batch_size", "4"),
        *("--device", "cpu", "--output_path", str(folder / output), "--log_samples"),
    ]


def written(folder: Path, output: str) -> dict[str, Any]:
    files = sorted((folder / output).rglob("results_*.json"))
    assert len(files) == 1
    found: dict[str, Any] = json.loads(files[0].read_text())["results"]
    return found


def same_results(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    for task in TASKS:
        for metric, value in theirs[task].items():
            if isinstance(value, int | float) and "stderr" not in metric:
                assert ours[task][metric] == pytest.approx(value, rel=1e-6, abs=1e-6), (task, metric)


def test_two_ranks_share_the_requests(folder: Path) -> None:
    """On CPUs, which the harness would not divide requests among; so it is told of two GPUs."""
    code = (
        "import sys, torch; torch.cuda.device_count = lambda: 2\n"
        "import streampack.integrations.lm_eval.model as ours\n"
        "score = ours.score\n"
        "def counted(model, pairs, **settings):\n"
        "    print('scores', torch.distributed.get_rank(), len(pairs), flush=True)\n"
        "    return score(model, pairs, **settings)\n"
        "ours.score = counted\n"
        "from lm_eval.__main__ import cli_evaluate; cli_evaluate()"
    )
    (folder / "ranks.py").write_text(code)
    out = command(
        folder,
        *("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(folder / "ranks.py")),
        *settings_of(folder, "streampack", "ranks"),
        ACCELERATE_USE_CPU="true",
        PYTHONPATH=str(ROOT),
    )
    counts = sorted(line for line in out.splitlines() if line.startswith("scores"))
    assert [line for line in counts if line.endswith(" 24")] == ["scores 0 24", "scores 1 24"], (
        "half of 48 each"
    )
    same_results(written(folder, "ranks"), evaluate(folder, "hf")["results"])
