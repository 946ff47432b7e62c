"""Final weights load in other libraries and give the same logits; the examples of docs/guides/after_training.md run."""

from __future__ import annotations

import base64
import json
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from safetensors.torch import load_file
from streampack_recipes import full_finetune, lora_finetune

from streampack.training.run import Run
from tests.harness.tiny_hf import hf_config

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "guides" / "after_training.md"
ADAPTERS = {
    "lora_attn_modules": ["q_proj", "k_proj", "v_proj", "output_proj"], "apply_lora_to_mlp": True,
    "lora_rank": 4, "lora_alpha": 12.0,
}  # fmt: skip
TOKENS = torch.randint(3, 14, (2, 12), generator=torch.Generator().manual_seed(0))

pytestmark = pytest.mark.filterwarnings(
    "ignore:`is_gradient_checkpointing`:FutureWarning"
)  # peft asks for it


def train(recipe: Any, config: Any, monkeypatch: pytest.MonkeyPatch) -> torch.Tensor:
    """Run a recipe and return the logits of its model at the end."""
    logits: list[torch.Tensor] = []
    end = Run.end

    def with_logits(run: Run, evaluate: Any) -> Any:
        run.model.eval()
        with torch.no_grad():
            out = run.model(TOKENS)
        logits.append(torch.cat(out, dim=1) if isinstance(out, list) else out)
        return end(run, evaluate)

    monkeypatch.setattr(Run, "end", with_logits)
    recipe.train(config)
    return logits[0]


@torch.no_grad()
def logits_of(model: Any) -> torch.Tensor:
    return model.eval()(TOKENS).logits


def from_folder(folder: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder)


def apart(ours: torch.Tensor, model: Any) -> float:
    return float((ours - logits_of(model)).abs().max())


def test_full_weights_load_in_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = train(full_finetune, hf_config(tmp_path, "qwen2"), monkeypatch)
    out = tmp_path / "out" / "epoch_0"
    assert apart(ours, from_folder(tmp_path / "base")) > 0.1, "it has learned nothing, so nothing is shown"
    assert apart(ours, from_folder(out)) < 1e-4
    assert (out / "tokenizer_config.json").exists()
    text = "red dog"
    theirs, its = (
        transformers.AutoTokenizer.from_pretrained(where)(text) for where in (tmp_path / "base", out)
    )
    assert its["input_ids"] == theirs["input_ids"]


@pytest.mark.parametrize(("family", "dora"), [("llama", True), ("qwen2", False), ("gemma", False)])
def test_adapters_and_merged_weights_have_the_trained_models_logits(
    family: str, dora: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = train(
        lora_finetune, hf_config(tmp_path, family, adapters=ADAPTERS | {"use_dora": dora}), monkeypatch
    )
    base, out, adapter = (tmp_path / name for name in ("base", "out/epoch_0", "out/adapter"))
    assert apart(ours, from_folder(base)) > 0.1
    assert not list(out.glob("adapter*")), "transformers would apply them to the merged weights"
    assert apart(ours, from_folder(out)) < 1e-4
    adapted = peft.PeftModel.from_pretrained(from_folder(base), str(adapter))
    assert apart(ours, adapted) < 1e-4
    written = json.loads((adapter / "adapter_config.json").read_text())
    assert written["base_model_name_or_path"] == str(base)
    names = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "down_proj", "up_proj"}
    assert set(written["target_modules"]) == names


def test_dora_of_layers_with_a_bias_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"q_proj has a bias, which DoRA scales .*; set use_dora to False"):
        train(
            lora_finetune, hf_config(tmp_path, "qwen2", adapters=ADAPTERS | {"use_dora": True}), monkeypatch
        )


# The page.


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE.read_text(), flags=re.M | re.S)


TINY = {"num_layers": 1, "num_heads": 2, "num_kv_heads": 1, "embed_dim": 32, "intermediate_dim": 48}


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder where `lora_finetune --config llama3_2/1B_lora_streamed` has run, on a model of one small layer."""
    builders = pytest.importorskip("torchtune.models.llama3_2._model_builders")
    folder = tmp_path_factory.mktemp("after")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for name in ("llama3_2", "lora_llama3_2"):  # what the builders of models in full size call
            patch.setattr(builders, name, _shrunk(getattr(builders, name)))
        base = Path("models/Llama-3.2-1B-Instruct")
        rope = {
            "rope_type": "llama3", "rope_theta": 500_000.0, "factor": 32.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
        }  # fmt: skip
        config = transformers.LlamaConfig(
            vocab_size=128256, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2,
            num_key_value_heads=1, max_position_embeddings=131072, rope_parameters=rope, tie_word_embeddings=True,
            rms_norm_eps=1e-5, initializer_range=0.3, bos_token_id=128000, eos_token_id=128009,
        )  # fmt: skip
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            transformers.LlamaForCausalLM(config).save_pretrained(base)
        _tokenizers(base)
        Path("chats").mkdir()
        chat = [{"role": "user", "content": "Name a colour."}, {"role": "assistant", "content": "red"}]
        Path("chats/a.jsonl").write_text((json.dumps({"messages": chat}) + "\n") * 8)
        run = OmegaConf.load(ROOT / "configs/llama3_2/1B_lora_streamed.yaml")
        changes = (
            "device=cpu dtype=fp32 epochs=null max_steps=20 num_workers=0 validation=null run_val_every_n_steps=null "
            "gradient_accumulation_steps=1 seed=0 "
            "data.max_seq_len=64 optimizer.fused=False optimizer.lr=0.01 lr_scheduler=null save_every_n_steps=null "
            "enable_activation_checkpointing=False"
        )
        run.merge_with_dotlist(changes.split())
        OmegaConf.save(run, "my.yaml")
        lora_finetune.train(run)
        yield folder


def _shrunk(builder: Any) -> Any:
    return lambda **sizes: builder(**(sizes | TINY))


def _tokenizers(folder: Path) -> None:
    """Write both tokenizers of a download of Llama 3.2; a token is a byte."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from torchtune.models.llama3._tokenizer import LLAMA3_SPECIAL_TOKENS

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = letters + [f"<unused {i}>" for i in range(len(letters), 128_000)]
    tokens = Tokenizer(models.BPE({letter: i for i, letter in enumerate(vocabulary)}, []))
    tokens.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokens.decoder = decoders.ByteLevel()
    by_number = sorted(LLAMA3_SPECIAL_TOKENS, key=lambda token: LLAMA3_SPECIAL_TOKENS[token])
    tokens.add_special_tokens([AddedToken(token, special=True) for token in by_number])
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokens, eos_token="<|eot_id|>")
    assert fast.convert_tokens_to_ids("<|eot_id|>") == 128009
    fast.chat_template = (
        "<|begin_of_text|>{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
        "{{ m.content }}<|eot_id|>{% endfor %}<|start_header_id|>assistant<|end_header_id|>\n\n"
    )
    fast.save_pretrained(folder)
    (folder / "original").mkdir()
    decoder = {letter: byte for byte, letter in _bytes_to_letters().items()}
    (folder / "original" / "tokenizer.model").write_text(
        "".join(
            f"{base64.b64encode(bytes([decoder[letter]])).decode()} {i}\n" for i, letter in enumerate(letters)
        )
    )


def _bytes_to_letters() -> dict[int, str]:
    """GPT-2's letters for bytes: printable ones are themselves, the others follow from 256 on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}


def test_the_page_in_transformers_and_peft(
    done: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(done)
    generate, adapt, load = blocks("python")
    exec(compile(generate, str(PAGE), "exec"), {})
    assert capsys.readouterr().out.splitlines()[-1] == "red"
    names: dict[str, Any] = {}
    exec(compile(adapt, str(PAGE), "exec"), names)
    folders = [Path("outputs/merged"), Path("outputs/llama3_2_1B_lora/epoch_0")]
    merged, ours = (load_file(next(folder.glob("model*.safetensors"))) for folder in folders)
    assert all(torch.allclose(merged[name], value, atol=1e-5) for name, value in ours.items())
    exec(compile(load, str(PAGE), "exec"), names)
    with torch.no_grad():
        assert apart(names["model"](TOKENS), from_folder(done / "outputs/llama3_2_1B_lora/epoch_0")) < 1e-4


HEADS = "<|start_header_id|>{}<|end_header_id|>\n\n"
RENDERED = (
    f"<|begin_of_text|>{HEADS.format('user')}Name a colour.<|eot_id|>{HEADS.format('assistant')}red<|eot_id|>"
)


@pytest.mark.parametrize(
    ("tokenizer", "said"), [("llama3_tokenizer", "Name a colour.red"), ("HFTokenizer", RENDERED)]
)
def test_the_page_in_torchtune(
    done: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tokenizer: str, said: str
) -> None:
    from torchtune._cli.tune import main

    monkeypatch.chdir(done)
    command, instead = blocks("bash")
    if tokenizer in instead:
        command = re.sub(r"(  tokenizer\..*\n)+", lambda _: instead, command)
    words = shlex.split(command.replace("\\\n", " "))
    monkeypatch.setattr(sys, "argv", [*words, "device=cpu", "dtype=fp32", "max_new_tokens=8"])
    with pytest.raises(SystemExit) as end:  # torchtune's recipes are scripts
        main()
    assert not end.value.code
    assert said in caplog.messages
