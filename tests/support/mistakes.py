"""The likeliest mistakes of a newcomer, each made through the door where it happens, with its message and cure.

tests/test_mistakes.py makes each and compares the message; docs/reference/errors.md is made from the table.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import streampack
from streampack import PackedDataLoader
from tests.support.doors import (
    command,
    encoder_decoder,
    file,
    first,
    packs,
    plain_model,
    resumed,
    sft,
    shuffled_stream,
    splits,
    texts,
    tokenizer,
    torch_loader,
    trained,
    validated,
    without,
)

FILES = "Files and rows"
TOKENS = "Tokenizers and samples"
CONFIGS = "Configs and commands"
LOADERS = "Datasets and loaders"
MODELS = "Models and Trainer"
INSTALL = "Installation"


@dataclass(frozen=True, kw_only=True)
class Mistake:
    """What a user does, and the message and the cure: ``make`` raises the error, or returns what is printed."""

    door: str
    title: str
    make: Callable[[Path], Any]
    message: str
    cure: str


MISTAKES = (
    Mistake(
        door=FILES,
        title="A path that leads nowhere",
        make=lambda folder: texts("data/*.jsonl"),
        message="no file matches 'data/*.jsonl' (looked in my_folder); check the path or the glob",
        cure="Correct the path. Relative paths begin in the folder where the command was started.",
    ),
    Mistake(
        door=FILES,
        title="A JSON array instead of lines",
        make=lambda folder: texts(file(folder, "rows.jsonl", '[{"text": "a"}, {"text": "b"}]')),
        message="rows.jsonl:1: a row must be a JSON object, this is a list; if the file is one JSON array, let "
        "datasets read it: HFSource('json', data_files='rows.jsonl', split='train')",
        cure="Read it with `HFSource`, or write one object on each line (`jq -c '.[]' rows.json > rows.jsonl`).",
    ),
    Mistake(
        door=FILES,
        title="An object over several lines",
        make=lambda folder: texts(file(folder, "rows.jsonl", '{\n "text": "a"\n}\n')),
        message="rows.jsonl:1: not a line of JSON (Expecting property name enclosed in double quotes: line 1 column"
        " 2 (char 1)); if the file is one JSON document, let datasets read it: HFSource('json', "
        "data_files='rows.jsonl', split='train')",
        cure="Write each row on one line (`jq -c . rows.json > rows.jsonl`).",
    ),
    Mistake(
        door=FILES,
        title="Python's quotes instead of JSON's",
        make=lambda folder: texts(file(folder, "rows.jsonl", "{'text': 'a'}\n")),
        message="rows.jsonl:1: not a line of JSON (Expecting property name enclosed in double quotes: line 1 column"
        " 2 (char 1)); Python wrote it in single quotes: write rows by json.dumps",
        cure='`file.write(json.dumps(row) + "\\n")`, and not `str(row)`.',
    ),
    Mistake(
        door=FILES,
        title="A CSV file",
        make=lambda folder: texts(file(folder, "rows.csv", "text\nhello\n")),
        message="rows.csv: it is no file of JSON lines; let datasets read it: HFSource('csv', "
        "data_files='rows.csv', split='train')",
        cure="`HFSource` reads CSV, TSV and text through `datasets` (extra `hf`).",
    ),
    Mistake(
        door=FILES,
        title="A text file",
        make=lambda folder: texts(file(folder, "rows.txt", "hello world\n")),
        message="rows.txt:1: not a line of JSON (Expecting value: line 1 column 1 (char 0)); if the file is plain "
        "text, let datasets read it: HFSource('text', data_files='rows.txt', split='train')",
        cure="With `HFSource('text', ...)` each line is a row with a column `text`.",
    ),
    Mistake(
        door=FILES,
        title="Another character set",
        make=lambda folder: texts(file(folder, "rows.jsonl", '{"text": "é"}\n'.encode("latin-1"))),
        message="rows.jsonl:1: not a line of JSON ('utf-8' codec can't decode byte 0xe9 in position 10: invalid "
        "continuation byte); JSON is UTF-8: convert the file, such as by iconv -f LATIN1 -t UTF-8",
        cure='Convert the file. To skip a few broken lines, set `on_bad_record="skip"`: they are counted and listed.',
    ),
    Mistake(
        door=FILES,
        title="All splits instead of one",
        make=lambda folder: splits(),
        message="a DatasetDict has several splits: 'train'; give one, such as dataset['train']",
        cure='`load_dataset(..., split="train")`, or index the dictionary.',
    ),
    Mistake(
        door=FILES,
        title="A stream that is shuffled already",
        make=lambda folder: shuffled_stream(),
        message="the stream is shuffled, and datasets loses the shuffle buffer on resume: rows would be lost and "
        "others come twice; leave .shuffle() out, and use IterablePackedDataset(..., shuffle=True)",
        cure="Let the packs shuffle: their order can be resumed.",
    ),
    Mistake(
        door=FILES,
        title="A generator",
        make=lambda folder: packs(row for row in [{"input_ids": [5]}]),
        message="a generator can be read only once, so neither a second epoch nor a resume is possible; pass a "
        "function that makes it: IterableSource(lambda: ...)",
        cure="Pass the function that makes it, without calling it.",
    ),
    Mistake(
        door=FILES,
        title="Packed twice",
        make=lambda folder: packs(packs([{"input_ids": [5] * 9}])),
        message="IterablePackedDataset gives packs, not rows; give the dataset that was packed, or leave packing to "
        "one of the two",
        cure="Give samples, not packs. In TRL, leave `packing` and `padding_free` off.",
    ),
    Mistake(
        door=FILES,
        title="Padded rows",
        make=lambda folder: first([{"input_ids": [5, 6, 0, 0], "attention_mask": [1, 1, 0, 0]}]),
        message="sample 0: the attention_mask hides the row's padding, which would be packed like its tokens; "
        "tokenize without padding (padding=False)",
        cure="Tokenize without `padding` (and without `truncation`, which loses tokens that nobody counts).",
    ),
    Mistake(
        door=TOKENS,
        title="Rows of text without an encoder",
        make=lambda folder: first(file(folder, "rows.jsonl", '{"text": "a"}\n')),
        message="rows.jsonl:1: column 'tokens' is missing; the row's columns are 'text'; such rows need an encoder:"
        " encoder=TextEncoder(tokenizer), or data.encoder in a config",
        cure="Name an encoder: [which for which rows](../guides/encoders.md).",
    ),
    Mistake(
        door=TOKENS,
        title="A tokenizer in place of an encoder",
        make=lambda folder: streampack.IterablePackedDataset(
            [{"text": "a"}], max_seq_len=8, encoder=tokenizer()
        ),
        message="encoder is a tokenizer, a TokenizersBackend; wrap it: TextEncoder(tokenizer) for rows of text, "
        "ChatEncoder(tokenizer) for messages, PromptCompletionEncoder(tokenizer) for prompts with answers",
        cure="Name an encoder: [which for which rows](../guides/encoders.md).",
    ),
    Mistake(
        door=TOKENS,
        title="Preference pairs without an encoder",
        make=lambda folder: first([{"prompt": "a", "chosen": "b", "rejected": "c"}]),
        message="sample 0: the row is a preference pair ('chosen', 'rejected'), whose answers must stay in one pack; "
        "such rows need an encoder: encoder=PreferenceEncoder(tokenizer), or data.encoder in a config; leave TRL's own "
        "trainers of pairs their collator",
        cure="`PreferenceEncoder`: [pairs and rollouts](../guides/groups.md).",
    ),
    Mistake(
        door=TOKENS,
        title="Preference pairs whose prompt has another name",
        make=lambda folder: first(
            [{"question": "a", "chosen": "b", "rejected": "c"}],
            encoder=streampack.PreferenceEncoder(tokenizer()),
        ),
        message="sample 0: there is no column 'prompt', and column 'question' would be left out; say prompt: question, "
        "or ignore: [question]",
        cure='Name the column: `PreferenceEncoder(tokenizer, prompt="question")`.',
    ),
    Mistake(
        door=TOKENS,
        title="A pair or rollout that is too long",
        make=lambda folder: first(
            [{"prompt": "a", "chosen": "b" * 61, "rejected": "c"}],
            encoder=streampack.PreferenceEncoder(tokenizer()),
        ),
        message="sample 0 is a group of 65 tokens, max_seq_len is 64, and a group is never split; set overlong to "
        "'truncate' or 'drop', or raise max_seq_len",
        cure="`overlong: truncate` cuts the ends of the longest answers, with `truncate_side: left` the beginning of "
        "the prompt: [groups](../guides/groups.md#too-long).",
    ),
    Mistake(
        door=TOKENS,
        title="Bare texts in place of rows",
        make=lambda folder: next(
            iter(
                streampack.IterablePackedDataset(
                    ["hello"], max_seq_len=8, encoder=streampack.TextEncoder(tokenizer())
                )
            )
        ),
        message="sample 0: the row is a str, 'hello'; it must be a dict with a column 'text'",
        cure='Give rows with names: `[{"text": text} for text in texts]`.',
    ),
    Mistake(
        door=TOKENS,
        title="Text in another column",
        make=lambda folder: texts(file(folder, "rows.jsonl", '{"content": "a"}\n')),
        message="rows.jsonl:1: column 'text' is missing; the row's columns are 'content'; the encoder's option "
        "column= names the one to read",
        cure='Every encoder takes the name of its column: `TextEncoder(tokenizer, column="content")`.',
    ),
    Mistake(
        door=TOKENS,
        title="A row without text",
        make=lambda folder: texts(file(folder, "rows.jsonl", '{"text": null}\n')),
        message="rows.jsonl:1: column 'text' holds no text (null); mend the row, or set on_bad_record='skip', which "
        "counts and lists such rows",
        cure="A few such rows may be skipped; if all are null, the text is in another column.",
    ),
    Mistake(
        door=TOKENS,
        title="A sample without a token",
        make=lambda folder: first([{"input_ids": []}]),
        message="sample 0 has 0 tokens; mend the row, or set empty='drop', which counts and leaves out such samples",
        cure='`empty="drop"`, in a config `data.empty: drop`.',
    ),
    Mistake(
        door=TOKENS,
        title="A tokenizer without a chat template",
        make=lambda folder: streampack.ChatEncoder(tokenizer(template=None)),
        message="the tokenizer TokenizersBackend has no chat template; give it one: chat_template: my.jinja",
        cure="A base model's tokenizer often has none. Take the instruct model's: "
        '`HFTokenizer(path, chat_template="my.jinja")`.',
    ),
    Mistake(
        door=TOKENS,
        title="A message without content",
        make=lambda folder: first(
            [{"messages": [{"role": "user", "content": None}]}], encoder=streampack.ChatEncoder(tokenizer())
        ),
        message="sample 0: column 'messages', message 0 (user) has no content (null) and no tool_calls; mend the "
        "row, or leave it out",
        cure='Mend the row; with `on_bad_record="skip"` such rows are skipped, counted and listed.',
    ),
    Mistake(
        door=TOKENS,
        title="A sample longer than a pack",
        make=lambda folder: first([{"input_ids": [5] * 100}]),
        message="sample 0 has 100 tokens, max_seq_len is 64; set overlong to 'split', 'truncate' or 'drop', or "
        "raise max_seq_len",
        cure="`split` keeps all tokens, `truncate` keeps the beginning, `drop` counts what it leaves out.",
    ),
    Mistake(
        door=TOKENS,
        title="A tokenizer that does not fit the model",
        make=lambda folder: first([{"input_ids": [5, 2000]}], vocab_size=1000),
        message="sample 0: token id 2000 is outside the vocabulary of 1000 ids (0 to 999); use the model's own "
        "tokenizer, or resize the model's embeddings",
        cure="Use the model's own tokenizer. After tokens were added to it, resize the model's embeddings.",
    ),
    Mistake(
        door=TOKENS,
        title="Labels of another length",
        make=lambda folder: first([{"input_ids": [5, 6, 7], "labels": [6, 7]}]),
        message="sample 0: 'input_ids' has 3 entries and 'labels' has 2; labels are unshifted, one per token, -100 "
        "where nothing is trained",
        cure="Do not shift labels: streampack's losses and the models do that.",
    ),
    Mistake(
        door=TOKENS,
        title="Nothing is trained",
        make=lambda folder: validated(
            folder, "data.shuffle", False, rows=[{"tokens": [3, 4], "labels": [-100, -100]}] * 40
        ),
        message="data: the first pack trains nothing: every label of its 16 sample(s) is masked, or was cut off; "
        "check the roles of the messages, overlong and max_seq_len",
        cure="The answers are masked, or cut off because the prompts fill the pack: `untrained: drop` leaves such "
        "samples out; raise `max_seq_len` if they are many.",
    ),
    Mistake(
        door=CONFIGS,
        title="A typo in a key",
        make=lambda folder: validated(folder, "data.shufle", True),
        message="data: unknown key 'shufle'; did you mean 'shuffle'?",
        cure="`streampack validate --config my.yaml` finds all of them before a GPU is rented.",
    ),
    Mistake(
        door=CONFIGS,
        title="A key of torchtune",
        make=lambda folder: validated(folder, "gradient_accumulation_steps", 8),
        message="unknown key 'gradient_accumulation_steps'; packs_per_step is the packs of an optimizer step over "
        "all ranks; batches accumulate until it is reached",
        cure="[All of torchtune's keys](../guides/coming_from_torchtune.md).",
    ),
    Mistake(
        door=CONFIGS,
        title="A key of Trainer",
        make=lambda folder: validated(folder, "per_device_train_batch_size", 8),
        message="unknown key 'per_device_train_batch_size'; write batch_size, which counts packs",
        cure="[Trainer's and TRL's keys](../guides/coming_from_trainer.md).",
    ),
    Mistake(
        door=CONFIGS,
        title="Packs longer than the model",
        make=lambda folder: validated(folder, "data.max_seq_len", 4096),
        message="data.max_seq_len=4096 is above model.max_seq_len=32, the positions that the model has; lower "
        "data.max_seq_len, or raise model.max_seq_len if the builder takes it",
        cure="Positions restart with every sample, but a sample may be as long as a pack.",
    ),
    Mistake(
        door=CONFIGS,
        title="The checkpoint of another model",
        make=lambda folder: validated(folder, "model.vocab_size", 4),
        message="model: the checkpointer's weights do not fit the model: size mismatch for tok_embeddings.weight, "
        "(16, 16) in the checkpoint and (4, 16) in the model; size mismatch for output.weight, (16, 16) in the "
        "checkpoint and (4, 16) in the model; name the model that the checkpoint is of",
        cure="The function that builds the model has the checkpoint's name: `torchtune.models.llama3_2.llama3_2_1b`.",
    ),
    Mistake(
        door=CONFIGS,
        title="A component that does not exist",
        make=lambda folder: validated(folder, "data.source._component_", "streampack.JSONSource"),
        message="data.source: _component_ 'streampack.JSONSource' leads to nothing that can be called; did you mean"
        " 'JSONLSource'?",
        cure="[All components of streampack](api.md).",
    ),
    Mistake(
        door=CONFIGS,
        title="A class of your own",
        make=lambda folder: validated(folder, "data.source._component_", "my_code.Rows"),
        message="data.source: _component_ 'my_code.Rows' is not among the components that a config may name; if you"
        " trust my_code, say so outside of the config: --trust my_code, or the variable "
        "STREAMPACK_TRUST=my_code",
        cure="A config may come from anywhere, so it may not name just any code: trust the module on the command line.",
    ),
    Mistake(
        door=CONFIGS,
        title="An encoder as text",
        make=lambda folder: validated(folder, "data.encoder", "streampack.TextEncoder"),
        message="data.encoder='streampack.TextEncoder' is text; write it as a component: {_component_: "
        "streampack.TextEncoder}",
        cure="Everything that is built is a mapping with `_component_`.",
    ),
    Mistake(
        door=CONFIGS,
        title="Weights that are not there",
        make=lambda folder: validated(folder, "checkpointer.checkpoint_dir", "models/llama"),
        message="checkpointer.checkpoint_dir='models/llama' is no folder; download the weights, or correct the path",
        cure="Download the weights first, such as by `tune download` or `hf download`.",
    ),
    Mistake(
        door=CONFIGS,
        title="A misspelt recipe or config",
        make=lambda folder: command("validate", "--config", "quikstart"),
        message="streampack: error: unknown config 'quikstart': neither a name that `streampack ls` lists nor a "
        "YAML file; did you mean 'quickstart'?",
        cure="`streampack ls` lists the names.",
    ),
    Mistake(
        door=CONFIGS,
        title="A command of another tool",
        make=lambda folder: command("trian", "--config", "quickstart"),
        message="streampack: error: unknown command 'trian': it is none of ls, cat, cp, validate, verify, inspect, "
        "unpack, trace, scan, tokenize, score, export, run; to train, write `streampack run RECIPE --config CONFIG`",
        cure="`streampack --help` lists the commands.",
    ),
    Mistake(
        door=CONFIGS,
        title="A value with two dashes",
        make=lambda folder: command("validate", "--config", "quickstart", "--max_steps", "3"),
        message="streampack: error: '--max_steps' is neither an option nor KEY=VALUE; `streampack validate --help` "
        "shows how it is used",
        cure="Write `max_steps=3`, without dashes.",
    ),
    Mistake(
        door=LOADERS,
        title="A strategy of another packer",
        make=lambda folder: packs([{"input_ids": [5]}], strategy="bfd"),
        message="strategy='bfd' is unknown; choose one of 'next_fit', 'first_fit', 'best_fit', 'exact_fit'; for "
        "documents that continue in the next pack set split_across_pack=True",
        cure="`exact_fit` fills packs as full as TRL's `bfd` over a whole data set: [choosing](../guides/choosing.md).",
    ),
    Mistake(
        door=LOADERS,
        title="torch's collator",
        make=lambda folder: next(iter(torch_loader(batch_size=2))),
        message="torch's default_collate cannot stack packs, which hold different numbers of samples; give the "
        "DataLoader collate_fn=streampack.collate_packed, or iterate a PackedDataLoader",
        cure="Best iterate a `PackedDataLoader`: it also keeps ranks in step and resumes exactly.",
    ),
    Mistake(
        door=LOADERS,
        title="Samples given to the loader",
        make=lambda folder: PackedDataLoader([{"input_ids": [5]}]),  # type: ignore[arg-type]
        message="a list is no stream of packs; give PackedDataLoader an IterablePackedDataset(rows, "
        "max_seq_len=...), or packs of a PackedDataset to torch's DataLoader with "
        "collate_fn=streampack.collate_packed",
        cure="The dataset packs, the loader makes batches of packs.",
    ),
    Mistake(
        door=LOADERS,
        title="More workers than lanes",
        make=lambda folder: next(
            iter(PackedDataLoader(packs([{"input_ids": [5]}] * 9, num_lanes=1), num_workers=2))
        ),
        message="1 lane cannot feed 2 consumers (ranks x workers): some would get nothing; use fewer workers, or "
        "start a new run with more num_lanes",
        cure="Leave `num_lanes` out when you begin a run: it is then at least the number of ranks x workers.",
    ),
    Mistake(
        door=LOADERS,
        title="A resume without a state",
        make=lambda folder: PackedDataLoader(packs([{"input_ids": [5] * 9}] * 9)).load_state_dict({}),
        message="this dict is no state of an IterablePackedDataset (version 1); give what loader.state_dict() "
        "returned during the run to go on with",
        cure="Save `loader.state_dict()` in the checkpoint, beside the model's and the optimizer's.",
    ),
    Mistake(
        door=LOADERS,
        title="A resume with other data",
        make=lambda folder: resumed(rows=11),
        message="the state was made with corpus.rows=10 and this dataset has corpus.rows=11; resume with what the "
        "run began with, or start a new run",
        cure="For files, [`corpus_changes`](../guides/data.md#files-that-change-during-a-run) allows it. Otherwise "
        "begin a new run from the weights.",
    ),
    Mistake(
        door=LOADERS,
        title="A resume with other settings",
        make=lambda folder: resumed(rows=10, max_seq_len=128),
        message="the state was made with max_seq_len=64 and this dataset has max_seq_len=128; resume with what the "
        "run began with, or start a new run",
        cure="[A second phase](../guides/several_devices.md#a-second-phase) may have others.",
    ),
    Mistake(
        door=MODELS,
        title="A Trainer that was not prepared",
        make=lambda folder: trained(folder, [{"input_ids": [5, 6]}] * 9, prepare=False),
        message="this Trainer would batch packs with default_data_collator, which does not know them: the model "
        "would get no input_ids, and no boundaries between samples; call "
        "prepare_trainer_for_packing(trainer) before it trains or evaluates",
        cure="Call `prepare_trainer_for_packing(trainer)` before `trainer.train()`.",
    ),
    Mistake(
        door=MODELS,
        title="Packing in TRL as well",
        make=sft,
        message="SFTConfig has packing=True, and rows that TRL has packed or flattened cannot be packed "
        "again: their samples would see one another; leave it out, packing is done here",
        cure="Leave `packing` out of `SFTConfig`.",
    ),
    Mistake(
        door=MODELS,
        title="A token that the model does not have",
        make=lambda folder: trained(folder, [{"input_ids": [5, 99_999]}] * 9),
        message="token id 99999 is outside the model's vocabulary of 1024 ids (0 to 1023); use the model's own "
        "tokenizer, or give the model more embeddings (model.resize_token_embeddings(len(tokenizer)))",
        cure="Use the model's own tokenizer.",
    ),
    Mistake(
        door=MODELS,
        title="A model that cannot be packed",
        make=lambda folder: encoder_decoder(),
        message="this model cannot be packed: t5 is an encoder-decoder model; a pack has no source and target side; "
        "train it on padded batches, one sample a row",
        cure="[Which models can](../guides/models.md).",
    ),
    Mistake(
        door=MODELS,
        title="flash-attn without a GPU",
        make=lambda folder: plain_model("flash"),
        message="attention='flash' needs CUDA, the model is on cpu; use attention='varlen', which runs anywhere",
        cure='`attention="auto"` takes what the model and the machine support.',
    ),
    Mistake(
        door=INSTALL,
        title="An extra that is not installed",
        make=lambda folder: without("pyarrow", lambda: packs(file(folder, "rows.parquet", b"PAR1"))),
        message="reading Parquet needs pyarrow: pip install 'streampack[parquet]'",
        cure="Each extra is named by the message: `parquet`, `remote`, `s3`, `zstd`, `hf`, `tune`, `flash`.",
    ),
    Mistake(
        door=INSTALL,
        title="Configs without torchtune",
        make=lambda folder: without("torchtune", lambda: command("validate", "--config", "quickstart")),
        message="streampack: error: `streampack validate` needs torchtune, which is not installed: pip install "
        "'streampack[tune]'",
        cure="The recipes need torchtune; Trainer and loops of your own do not.",
    ),
)
