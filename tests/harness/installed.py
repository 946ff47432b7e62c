"""The README's commands, typed by somebody who has only the wheel, chats and a model.

    .venv-wheel/bin/python -P tests/harness/installed.py

Imports nothing of the clone. Exits with an error at the first command that fails or leaves nothing behind.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
import time
from pathlib import Path

CHATML = (
    "{% for m in messages %}<|{{ m['role'] }}|>{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}"
    "{{ eos_token }}{% endgeneration %}{% else %}{{ m['content'] }}{% endif %}{% endfor %}"
)


def make_model(folder: Path) -> None:
    """Write a small llama with a tokenizer of bytes and a chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    letters = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    bpe = Tokenizer(models.BPE(vocab=letters, merges=[]))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="</s>", pad_token="<pad>")
    tokenizer.chat_template = CHATML
    tokenizer.save_pretrained(folder)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
    )
    LlamaForCausalLM(config).save_pretrained(folder)


def main() -> None:
    """Run all commands in a folder that is removed after."""
    with tempfile.TemporaryDirectory() as name:
        os.chdir(name)
        make_model(Path("my_model"))
        Path("chats").mkdir()
        turns = [{"role": "user", "content": "what is this"}, {"role": "assistant", "content": "a test"}]
        Path("chats/rows.jsonl").write_text((json.dumps({"messages": turns}) + "\n") * 400)
        example = (
            "python -m streampack_examples.chat_sft --model my_model --data chats/*.jsonl --max-seq-len 256"
        )
        commands = {  # and what each leaves
            "streampack --version": None,
            "streampack ls": None,
            f"{example} --max_steps 3 --disable_tqdm True --use_cpu True": "outputs/chat/report.html",
            "streampack inspect chats/*.jsonl --tokenizer my_model --max-seq-len 256 --html packs.html": "packs.html",
            "streampack cp chat_sft .": "chat_sft.py",
            "streampack cp quickstart my.yaml": "my.yaml",
            "streampack run full_finetune --config quickstart max_steps=3 device=cpu": "outputs/quickstart/report.html",
        }
        for command, left in commands.items():
            begin = time.monotonic()
            subprocess.run(command, shell=True, check=True)  # of the PATH
            print(f"[{time.monotonic() - begin:.0f} s] {command}", flush=True)
            if left is not None and not Path(left).is_file():
                raise SystemExit(f"{command} left no {left}")
        where = subprocess.check_output(
            ["python", "-c", "import streampack; print(streampack.__file__)"], text=True
        )
        print(f"all of it with {where}")


if __name__ == "__main__":
    main()
