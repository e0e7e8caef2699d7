"""What every tokenizer is: a table of byte strings, one per id, and a way to cut text into them.

Everything that reads text out (`decode`, `StreamDecoder`, `token_bytes`) is made from that table alone, so a streamed
text and a whole one cannot differ, and bits per byte count the bytes that really come out.
"""

import abc
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from jaxllm.data.checks import Log
from jaxllm.errors import UserError

SIDECAR = "jaxllm_tokenizer.json"
MAX_JSON_BYTES = 512 * 2**20


class Tokenizer(abc.ABC):
    """A ready tokenizer. Ids are `0 .. vocab_size-1`; of the special ids only `eos_id` is always there."""

    pieces: Sequence[bytes]  # the bytes of each id, empty for special tokens and holes
    eos_id: int
    bos_id: int | None
    pad_id: int | None
    strip_space: bool  # SentencePiece kinds: the encoder itself put a space before the text; decoding takes it off
    # Files that a publisher keeps beside the tokenizer (chat template, generation settings), by name: they travel with it.
    companions: Mapping[str, str] = MappingProxyType({})

    @property
    def vocab_size(self) -> int:
        """One more than the largest id."""
        return len(self.pieces)

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Ids that end a generation: `eos_id`, and whatever else the publisher's generation settings name."""
        return (int(self.eos_id),)

    @abc.abstractmethod
    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of each text, without special tokens: a text that spells `<|eos|>` gets ordinary ids."""

    @abc.abstractmethod
    def save(self, folder: str | os.PathLike[str]) -> None:
        """Writes what `load_tokenizer(folder)` needs: JSON only."""

    def encode(self, text: str) -> list[int]:
        """Ids of one text, without special tokens."""
        return self.encode_batch([text])[0]

    def document(self, text: str) -> list[int]:
        """Ids of a text as training sees it: `bos` where there is one, the text, `eos`."""
        return [*self.prompt(text), self.eos_id]

    def prompt(self, text: str) -> list[int]:
        """Ids of a text that starts a document, as training sees it: `bos` where there is one, and the text."""
        return ([] if self.bos_id is None else [self.bos_id]) + self.encode(text)

    def piece(self, token: int) -> bytes:
        """The bytes that one id stands for. Raises UserError for an id outside the vocabulary."""
        if not 0 <= token < len(self.pieces):
            raise UserError(f"token id {token} is outside the vocabulary (0..{len(self.pieces) - 1})")
        return self.pieces[token]

    def decode(self, ids: Iterable[int]) -> str:
        """Text of `ids`; special tokens give nothing, bytes that are not UTF-8 give U+FFFD."""
        raw = b"".join(self.piece(int(i)) for i in ids)
        if self.strip_space and raw.startswith(b" "):
            raw = raw[1:]
        return raw.decode("utf-8", errors="replace")

    def token_bytes(self) -> np.ndarray:
        """int32 [vocab_size]: bytes of text per token, 0 for special tokens. Turns nats a token into bits per byte."""
        return np.array([len(p) for p in self.pieces], np.int32)


class TokenizerSpec(abc.ABC):
    """What a config names: how to come by a tokenizer for a corpus. Its fields are the config."""

    @abc.abstractmethod
    def fit(self, texts: Iterable[str], base: Path, log: Log = None) -> Tokenizer:
        """The tokenizer. Only kinds that are trained read `texts`; `base` is where relative paths start."""

    @abc.abstractmethod
    def identity(self, base: Path) -> dict[str, Any]:
        """JSON facts that decide which ids a text gets: part of the token cache's fingerprint."""


def utf8(text: str) -> bytes:
    """`text` as UTF-8. Raises UserError for a lone surrogate, which JSON and shell arguments can smuggle in."""
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError as error:
        code = ord(text[error.start])
        raise UserError(
            f"text holds a lone surrogate (U+{code:04X} at character {error.start}), "
            "which is not valid Unicode: repair the text"
        ) from None


def write_sidecar(folder: str | os.PathLike[str], facts: dict[str, Any]) -> None:
    """Our own small file beside (or instead of) tokenizer.json: the kind and the special ids."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    (Path(folder) / SIDECAR).write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")


def read_text(path: Path) -> str:
    """A tokenizer file that a stranger may have written: bounded in size, one clear line when it is unreadable."""
    try:
        if path.stat().st_size > MAX_JSON_BYTES:
            raise UserError(f"{path}: {path.stat().st_size} bytes is too large for a tokenizer file")
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None
    except UnicodeDecodeError:
        raise UserError(f"{path}: is not UTF-8 text") from None


def read_json(path: Path) -> Any:
    """The JSON value in a tokenizer file."""
    text = read_text(path)
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise UserError(f"{path}: is not valid JSON") from None
