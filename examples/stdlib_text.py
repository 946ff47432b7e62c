"""Questions and answers about the standard library, a tokenizer and a small llama, without a download."""

from streampack_recipes.stdlib_corpus import docstring_pairs
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast


def pairs() -> list[dict[str, str]]:
    r"""Return about 6,700 rows ``{"prompt": "What does `json.dumps` do?\n", "completion": ...}``."""
    return [{"prompt": f"{row['input']}\n", "completion": row["output"]} for row in docstring_pairs()]


def train_tokenizer(rows: list[dict[str, str]]) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE of 2,048 tokens, in some seconds."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=2048, special_tokens=["<pad>", "<eos>"], initial_alphabet=alphabet, show_progress=False
    )
    bpe.train_from_iterator((row["prompt"] + row["completion"] for row in rows), trainer)
    return PreTrainedTokenizerFast(tokenizer_object=bpe, pad_token="<pad>", eos_token="<eos>")


def random_llama(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """Build a llama of two layers with random weights, which a CPU trains in seconds."""
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "num_hidden_layers": 2}
    ids = {
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
    }
    return LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **sizes, **ids))
