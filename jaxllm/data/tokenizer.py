"""Tokenizers by name: raw bytes here, the subword kinds from `subword.py`, and the loader of saved ones.

A config names each of them as `jaxllm.data.tokenizer.NAME`: `Bytes`, `BPE`, `TokenizerFile`.
"""

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxllm.data.checks import Log
from jaxllm.data.stream import StreamDecoder
from jaxllm.data.subword import BPE, JsonTokenizer, TokenizerFile
from jaxllm.data.vocabulary import SIDECAR, Tokenizer, TokenizerSpec, read_json, utf8, write_sidecar
from jaxllm.errors import UserError

__all__ = [
    "BPE",
    "Bytes",
    "JsonTokenizer",
    "StreamDecoder",
    "Tokenizer",
    "TokenizerFile",
    "TokenizerSpec",
    "load_tokenizer",
]


@dataclass(frozen=True)
class Bytes(Tokenizer, TokenizerSpec):
    """UTF-8 bytes as ids 0..255, then `bos` 256 and `eos` 257. No training, no files, one token a byte."""

    def __post_init__(self) -> None:
        fixed = {
            "pieces": tuple(bytes([i]) for i in range(256)) + (b"", b""),
            "bos_id": 256,
            "eos_id": 257,
            "pad_id": None,
            "strip_space": False,
        }
        for name, value in fixed.items():
            object.__setattr__(self, name, value)  # a frozen dataclass that also carries the base's attributes

    def fit(self, texts: Iterable[str], base: Path, log: Log = None) -> "Bytes":
        return self

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [list(utf8(text)) for text in texts]

    def identity(self, base: Path) -> dict[str, Any]:
        return {"kind": "bytes"}

    def save(self, folder: str | os.PathLike[str]) -> None:
        write_sidecar(folder, {"kind": "bytes"})


def load_tokenizer(folder: str | os.PathLike[str]) -> Tokenizer:
    """The tokenizer that `save` wrote into `folder`, or that of a Hugging Face folder (its `tokenizer.json`)."""
    place = Path(folder)
    if not place.is_dir():
        raise UserError(f"{place}: no tokenizer folder there")
    own, table = place / SIDECAR, place / "tokenizer.json"
    facts = read_json(own) if own.is_file() else None
    if own.is_file() and (not isinstance(facts, dict) or facts.get("kind") not in ("bytes", "json")):
        raise UserError(f'{own}: must hold a JSON object whose kind is "bytes" or "json"')
    if facts is not None and facts["kind"] == "bytes":
        return Bytes()
    if not table.is_file():
        raise UserError(f"{place}: holds no tokenizer ({SIDECAR} or tokenizer.json)")
    if facts is None:
        return TokenizerFile(str(table)).fit([], place)
    return JsonTokenizer.load(table, **{name: facts.get(name) for name in ("eos_id", "bos_id", "pad_id")})
