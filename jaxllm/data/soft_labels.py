"""A teacher's likeliest next ids for every token of a text, on disk, for distillation without the teacher.

    meta.json    what they were made of: the text, the tokenizer, the rows, the teacher, k and the temperature; how many rows are done
    ids.bin      uint16 or uint32 [rows, t, k]      the k likeliest ids, likeliest first
    logp.bin     float16 or float32 [rows, t, k+1]  logarithms of their probabilities, and of all others together
    tokenizer/   the teacher's

Labels belong to rows, because what a teacher says depends on where a row begins: the rows of the text's documents in their own order, cut
at `seq_len` (`Loader(fixed=True)`). They are good for any seed, number of epochs and batch size. Little endian; nothing is ever unpickled.
"""

import json
import math
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jaxllm.data.plan import row_count
from jaxllm.data.store import TokenStore
from jaxllm.data.tokenizer import Tokenizer, load_tokenizer
from jaxllm.errors import UserError

FORMAT = 1
LEAST = -1e4  # a logarithm that float16 holds and whose exponential is 0
IDS, LOGP, META, TOKENIZER = "ids.bin", "logp.bin", "meta.json", "tokenizer"
NAMES = ("soft_ids", "soft_logp")  # in a batch
TEXT = ("sha256", "documents", "tokens", "train_documents", "train_tokens")  # facts that two equal texts share
WORDS = {"text": "another text", "seq_len": "rows of another length", "rows": "another number of rows"}


def description(facts: Mapping[str, Any], store: TokenStore, seq_len: int) -> dict[str, Any]:
    """What decides the rows: two texts with equal descriptions have the same ones."""
    return {
        "text": {name: facts.get(name) for name in TEXT},
        "seq_len": seq_len,
        "rows": row_count(store, seq_len, 1),
    }


@dataclass(frozen=True)
class SoftLabels:
    """Finished labels. meta: see the module; ids, logp: read-only memory maps."""

    folder: Path
    meta: dict[str, Any]
    ids: np.ndarray
    logp: np.ndarray
    tokenizer: Tokenizer

    @property
    def top_k(self) -> int:
        return int(self.meta["top_k"])

    @classmethod
    def open(cls, folder: Path, key: str) -> "SoftLabels":
        """Raises UserError, one line that starts with `key`, for a folder that is none, is unfinished, or does not add up."""
        meta = read_meta(folder, key)
        if meta["done"] < meta["rows"]:
            raise UserError(
                f"{key}: only {meta['done']:,} of {meta['rows']:,} rows are labelled; run the same task=label again to finish"
            )
        try:
            tokenizer = load_tokenizer(folder / TOKENIZER)
            ids, logp = (_map(folder, meta, name, "r") for name in (IDS, LOGP))
        except (OSError, ValueError) as error:
            raise UserError(f"{key}: cannot be read ({error}); make it anew with task=label") from None
        return cls(folder, meta, ids, logp, tokenizer)

    def check(self, wanted: Mapping[str, Any], key: str) -> None:
        """Refuse to be read beside rows that are not those the teacher saw. wanted: see `description`."""
        for name, words in WORDS.items():
            if self.meta[name] != wanted[name]:
                raise UserError(
                    f"{key}: labels of {words}: {name} {_short(self.meta[name])}, here {_short(wanted[name])};"
                    " make them anew with task=label"
                )

    def rows(self, rows: np.ndarray) -> dict[str, np.ndarray]:
        """`soft_ids` int32 `[n t k]`, `soft_logp` float32 `[n t k+1]` of some rows; of row -1, padding, any."""
        at = np.maximum(rows, 0)
        return {"soft_ids": self.ids[at].astype(np.int32), "soft_logp": self.logp[at].astype(np.float32)}


def read_meta(folder: Path, key: str) -> dict[str, Any]:
    """The description of a folder of labels, with everything that is read from it checked."""
    try:
        meta = json.loads((folder / META).read_text(encoding="utf-8"))
        if meta["format"] != FORMAT or meta["ids"] not in ("<u2", "<u4") or meta["logp"] not in ("<f2", "<f4"):
            raise ValueError("of another format")
        for name in ("rows", "seq_len", "top_k", "vocab_size", "done"):
            if not isinstance(meta[name], int) or meta[name] < 0:
                raise ValueError(f"{name} is {meta[name]!r}")
        return {**meta, "temperature": float(meta["temperature"]), "text": dict(meta["text"])}
    except FileNotFoundError:
        raise UserError(f"{key}: no labels there (no {META}); task=label makes them") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{key}: {META} cannot be read ({error})") from None


def _short(value: Any) -> str:
    return json.dumps(value)[:80]


def _map(folder: Path, meta: Mapping[str, Any], name: str, mode: Any) -> np.ndarray:
    width = meta["top_k"] + (name == LOGP)
    dtype = np.dtype(meta["ids" if name == IDS else "logp"])
    shape = (meta["rows"], meta["seq_len"], width)
    want = math.prod(shape) * dtype.itemsize
    if (size := (folder / name).stat().st_size) != want:
        raise ValueError(f"{name} has {size} bytes, not {want}")
    return np.memmap(folder / name, dtype=dtype, mode=mode, shape=shape)


class Writer:
    """Labels in the making: rows in order, so that an interrupted run goes on behind the last row that it said was done."""

    def __init__(self, folder: Path, meta: Mapping[str, Any], tokenizer: Tokenizer, key: str, most: float):
        """most: bytes that they may take. Raises UserError where they would take more, the disk has no room, or `folder` holds other
        labels."""
        self.folder, self.key = folder, key
        self.meta = {**meta, "format": FORMAT, "done": 0}
        if (folder / META).exists():
            old = read_meta(folder, key)
            for name in meta:
                if old[name] != meta[name]:
                    raise UserError(
                        f"{key}: holds labels with {name} {_short(old[name])}, not {_short(meta[name])}; name another folder"
                    )
            self.meta = old
            self.ids, self.logp = (_map(folder, self.meta, name, "r+") for name in (IDS, LOGP))
            return
        if folder.exists() and any(folder.iterdir()):
            raise UserError(f"{key}: is not empty and holds no labels; name another folder")
        self._reserve(most)
        tokenizer.save(folder / TOKENIZER)
        self.ids, self.logp = (_map(folder, self.meta, name, "r+") for name in (IDS, LOGP))
        self._note()

    def _reserve(self, most: float) -> None:
        tokens, k = self.meta["rows"] * self.meta["seq_len"], self.meta["top_k"]
        sizes = {
            IDS: tokens * k * np.dtype(self.meta["ids"]).itemsize,
            LOGP: tokens * (k + 1) * np.dtype(self.meta["logp"]).itemsize,
        }
        total = sum(sizes.values())
        if total > most:
            raise UserError(
                f"label.max_gb={most / 1e9:g}: {tokens:,} tokens with {k} labels each take {total / 1e9:.3g} GB; lower"
                " label.top_k or raise it"
            )
        self.folder.mkdir(parents=True, exist_ok=True)
        if total > (free := shutil.disk_usage(self.folder).free):
            raise UserError(f"{self.key}: needs {total / 1e9:.3g} GB and the disk has {free / 1e9:.3g} GB left")
        for name, size in sizes.items():
            with open(self.folder / name, "wb") as file:
                file.truncate(size)

    @property
    def done(self) -> int:
        return int(self.meta["done"])

    def put(self, ids: np.ndarray, logp: np.ndarray) -> None:
        """The next rows: ids `[n t k]`, logp `[n t k+1]`."""
        at = slice(self.done, self.done + len(ids))
        self.ids[at], self.logp[at] = ids, np.maximum(logp, LEAST)
        self.meta["done"] += len(ids)

    def flush(self) -> None:
        """What was put is on the disk before it is said to be done."""
        for array in (self.ids, self.logp):
            getattr(array, "flush", lambda: None)()
        self._note()

    def _note(self) -> None:
        part = self.folder / f".{META}.part"
        part.write_text(json.dumps(self.meta, indent=1) + "\n", encoding="utf-8")
        os.replace(part, self.folder / META)
