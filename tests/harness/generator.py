"""Corpora and settings drawn at random, and the oracle that knows both."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from streampack import IterablePackedDataset, Mix, Sample, TokensEncoder
from streampack.sources import (
    IterableSource,
    JSONLSource,
    MDSSource,
    ParquetSource,
    TokenShardSource,
    as_source,
)
from streampack.tokenize import tokenize
from tests.harness.corpus import PACK, in_memory
from tests.harness.files import write_mds
from tests.oracle.streams import IGNORE, Oracle, Text

KINDS = ("map", "map", "iterable", "jsonl", "compressed", "remote", "parquet", "tokens", "mds")
EOS = 999_983
TOO_LONG = ["drop", "drop", "split", "split", "truncate", "truncate_left"]


class Table:
    """Encodes ``{"i": 3}`` as row 3 of a table; None there is a record that cannot be encoded."""

    def __init__(self, table: list[Text | None], *, eos_id: int | None) -> None:
        self.table = table
        self.eos_id = eos_id

    def __call__(self, row: Mapping[str, Any], /) -> Sample:
        if (found := self.table[row["i"]]) is None:
            raise ValueError("is broken")
        tokens, labels = (
            np.array(ids, np.int64 if max(found[0], default=0) >> 31 else np.int32) for ids in found
        )
        return Sample(tokens, tokens if found[0] == found[1] else labels)

    def fingerprint(self) -> str:
        return "table"


class Case:
    """One configuration: a corpus in memory or in ``folder``, settings, and the oracle that knows both."""

    def __init__(self, rng: random.Random, folder: Path, *, resumes: bool = False) -> None:
        self.rng, self.folder, self.resumes = rng, folder, resumes
        self.drew: Counter[str] = Counter()  # what a test prints, to show what its cases were
        self.table: list[Text | None] = []
        self.next_id = rng.choice([1, 1, 1, 40_000, 2**31 - 500])  # all tokens differ
        self.mixed = rng.random() < 0.2
        self.encoded = rng.random() < 0.5
        limit = self.limit = rng.choice([1, 2, 3, 8, 16, 24, 64, 64, 200, 500])
        if self.mixed:
            limit = self.limit = max(8, limit)
        gentle = self.mixed or resumes or rng.random() < 0.8
        endless = resumes and rng.random() < 0.15
        self.epochs = None if endless else rng.choice([1, 1, 1, 2, 3])
        self.first_epoch = 0 if endless else rng.choice([0, 0, 0, 1, 5])
        self.eos_id = rng.choice([None, EOS])
        strategy = rng.choice(["exact_fit", "exact_fit", "best_fit", "first_fit", "next_fit", None])
        self.settings: dict[str, Any] = {
            "max_seq_len": limit,
            "strategy": strategy,
            "split_across_pack": rng.random() < 0.15 or strategy is None,
            "buffer_size": rng.choice([1, 2, 5, 16, 128]),
            "overlong": rng.choice(TOO_LONG + [None, "error"] * (not gentle)),
            "max_seqs_per_pack": rng.choice([None, None, None, 1, 3, 7]),
            "untrained": rng.choice([None, "keep", "drop", "drop"] + ["error"] * (not gentle)),
            "shuffle": (rng.random() < 0.6) * rng.choice([1, 3, 32, 2048]) or False,
            "seed": rng.randrange(1000),
            "epochs": self.epochs,
            "padding_idx": rng.choice([0, 0, EOS + 1]),
            "skip_bad": 10**6 if gentle else rng.choice([10**6, False]),
        }
        if self.settings["split_across_pack"]:
            self.settings["strategy"] = None  # refused there
        # From a generator of its own, so that a case is otherwise the one that it is without.
        balance = random.Random(str(self.settings))
        self.settings["balance_window"] = balance.choice([None, None, 1, 2, 5, 64])
        multiples = [number for number in (2, 3, 4, 8, 16, limit) if limit % number == 0]
        self.settings["pad_seqs_to"] = balance.choice([1, 1, *multiples[:1], *multiples[-1:]])
        if self.settings["strategy"] and balance.random() < 0.15:
            self.settings |= {"strategy": "padded", "buffer_size": 128, "max_seqs_per_pack": None}
        rows: dict[str, Text | None] = {}
        self.weights: dict[str, float] = {}
        stop = None
        if self.mixed:
            stop = rng.choice(["first_exhausted", "all_exhausted"] + ["never"] * endless)
            (source, self.weights), self.encoder = self._mix(rows, stop), None
        else:
            kind = rng.choice(KINDS)
            source = self._leaf(kind, rows, "", count=rng.choice([1, 2, 5, 20, 60, 120]), name="leaf")
            self.encoder = self._encoder() if self.encoded or self.eos_id else None
        self.source = as_source(source)
        self.single = self.source.varies_by_process  # in workers of torch
        self.num_lanes = rng.choice([1, 2, 3, 8] if self.mixed else [None, 1, 2, 3, 5, 8])
        self.oracle = Oracle(rows, self.settings, self.source.locate, stop, self.first_epoch, self.eos_id)
        self.drew[f"{self.settings['strategy']}"] += 1
        for name, drawn in (
            ("mixtures", self.mixed), ("endless", endless), ("set_epoch", self.first_epoch),
            ("several epochs", self.epochs != 1), ("balance windows", self.settings["balance_window"]),
            ("split_across_pack", self.settings["split_across_pack"]), ("shuffled", self.settings["shuffle"]),
        ):  # fmt: skip
            self.drew[name] += bool(drawn)

    def _encoder(self) -> Any:
        """Return an encoder for the rows of the newest source."""
        return Table(self.table, eos_id=self.eos_id) if self.encoded else TokensEncoder(eos_id=self.eos_id)

    def dataset(self) -> IterablePackedDataset:
        made = IterablePackedDataset(
            self.source, encoder=self.encoder, num_lanes=self.num_lanes, **self.settings
        )
        if self.first_epoch:
            made.set_epoch(self.first_epoch)
        return made

    def __str__(self) -> str:
        kind = type(self.source).__name__
        begins = f", from epoch {self.first_epoch} on" if self.first_epoch else ""
        return f"{kind} of {len(self.table)} rows, num_lanes={self.num_lanes}{begins}, {self.settings}"

    def _texts(self, count: int, *, empty: bool) -> list[Text | None]:
        rng = self.rng
        longest = max(
            1, rng.choice([self.limit // 2, self.limit, self.limit, 2 * self.limit, 4 * self.limit])
        )
        count = min(count, 6000 // longest + 1)
        skewed, masks, empty = rng.random() < 0.5, rng.random() < 0.7, empty and rng.random() < 0.3
        if few := self.mixed and count < 12:  # a source of which no row is trained is refused
            longest, skewed, empty, masks = self.limit // 2, False, False, False
        made: list[Text | None] = []
        for _ in range(count):
            size = rng.randint(2 if few else 1, longest)
            size = min(size, rng.randint(1, longest)) if skewed else size
            size = 0 if empty and rng.random() < 0.1 else size
            tokens = list(range(self.next_id, self.next_id + size))
            self.next_id += size
            if tokens and rng.random() < 0.5:
                tokens[-1] = EOS
            mask = (
                rng.choice(["all", "prompt", "random", "none" if rng.random() < 0.3 else "all"])
                if masks
                else "all"
            )
            trained = {
                "all": lambda at: True,
                "prompt": lambda at, cut=size // 3: at >= cut,
                "random": lambda at: rng.random() < 0.5,
                "none": lambda at: False,
            }[mask]
            labels = [token if trained(at) else IGNORE for at, token in enumerate(tokens)]
            broken = self.encoded and not self.mixed and rng.random() < 0.01
            made.append(None if broken else (tokens, labels))
        return made

    def _leaf(self, kind: str, rows: dict[str, Text | None], prefix: str, *, count: int, name: str) -> Any:
        """A source of new rows; ``rows`` learns their places, in the words of `Source.locate`."""
        self.drew[f"{kind} sources"] += 1
        self.drew["small sources of mixtures"] += self.mixed and count < 12
        encoded = self.encoded and kind != "tokens"
        self.encoded = encoded if not self.mixed else self.encoded
        texts = self._texts(count, empty=kind != "tokens")  # `tokenize` refuses them
        first, rng = len(self.table), self.rng
        self.table += texts
        column = rng.choice(["tokens", "input_ids"])
        data: list[dict[str, Any]] = [
            {"i": first + i} if encoded else dict(zip((column, "labels"), text or ([], []), strict=True))
            for i, text in enumerate(texts)
        ]
        folder = self.folder / f"{name}-{first}"
        folder.mkdir()
        bounds = [0, *sorted(rng.randint(0, len(data)) for _ in range(2)), len(data)]
        files = [(folder / f"{n}.{kind}", a, b) for n, (a, b) in enumerate(pairwise(bounds)) if a < b]
        if kind == "map":
            source, places = data, [f"sample {i}" for i in range(len(data))]
        elif kind == "iterable":
            source, places = IterableSource(data), [f"row {i}" for i in range(len(data))]
        elif kind in ("jsonl", "compressed", "remote"):
            blank = "\n" * rng.randint(0, 1)
            files = [
                (path.with_suffix(suffix), a, b)
                for path, a, b in files
                for suffix in [rng.choice([".jsonl.gz", ".jsonl.zst"]) if kind == "compressed" else ".jsonl"]
            ]
            for path, a, b in files:
                lines = "".join(blank + json.dumps(row) + "\n" for row in data[a:b]).encode()
                path.write_bytes(PACK[path.suffix if kind == "compressed" else ""](lines))
            names: list[Any] = [path for path, _, _ in files]
            if kind == "remote":
                url = in_memory(folder)
                names = [f"{url}/{path.name}" for path in names]
            places = []
            for path, (_, a, b) in zip(names, files, strict=True):
                at = 0  # of a remote file, lines are not counted
                for i, row in enumerate(data[a:b]):
                    at += len(blank)
                    places.append(
                        f"{path}, byte {at}" if kind == "remote" else f"{path}:{(i + 1) * (1 + len(blank))}"
                    )
                    at += len(json.dumps(row)) + 1
            source = JSONLSource(names)
        elif kind == "parquet":
            ids = pa.list_(pa.int64())
            schema = pa.schema([("i", pa.int64())] if encoded else [(column, ids), ("labels", ids)])
            for path, a, b in files:
                table = pa.Table.from_pylist(data[a:b], schema)
                pq.write_table(table, path, row_group_size=rng.choice([1, 4, 50]))
            places = [f"{path}, row {i}" for path, a, b in files for i in range(b - a)]
            source = ParquetSource([path for path, _, _ in files])
        elif kind == "mds":
            per_shard = rng.randint(1, 40)
            source = MDSSource(write_mds(folder, data, dict.fromkeys(data[0], "json"), per_shard=per_shard))
            places = [
                f"{folder}/shard.{i // per_shard:05d}.mds, sample {i % per_shard}" for i in range(len(data))
            ]
        else:
            size, shard, held, at, places = rng.choice([10, 300, 10**6]), 0, 0, 0, []
            for text in texts:
                assert text is not None
                places.append(f"{folder}/tokens-00000-{shard:05d}.bin, document {at}")
                held, at = held + len(text[0]), at + 1
                if held >= size:
                    shard, held, at = shard + 1, 0, 0
            with mock.patch("os.fsync"):  # a disk's business
                source = TokenShardSource(
                    tokenize(data, out=folder, lanes=1, shard_tokens=size, progress=False)
                )
        rows |= {prefix + place: text for place, text in zip(places, texts, strict=True)}
        return source

    def _mix(self, rows: dict[str, Text | None], stop: str) -> tuple[Mix, dict[str, float]]:
        """Draw a mixture, with the weight of each of its sources."""
        rng, entries = self.rng, []
        weights: dict[str, float] = {}
        for name in "abc"[: rng.choice([2, 2, 3])]:
            entry: dict[str, Any] = {"name": name, "weight": rng.choice([1, 1, 2, 3.5])}
            weights[name] = entry["weight"]
            kind = rng.choice(KINDS)
            self.encoded = rng.random() < 0.5
            entry["source"] = self._leaf(
                kind, rows, f"{name}: ", count=rng.choice([1, 3, 20, 40, 80]), name=f"leaf-{name}"
            )
            self.encoded &= kind != "tokens"
            entry["encoder"] = self._encoder()
            entries.append(entry)
        return Mix(entries, stop=stop), weights
