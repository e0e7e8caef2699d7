"""A tokenised corpus and the interface of every source of text.

A source is a plain dataclass: its fields are the config. `source.prepare(log)` gives a `Corpus`, tokenised once and
kept (see `cache.py`). A new source writes one method, `open`, and gets tokenizers, caching, splitting and loading.
"""

import abc
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from jaxllm.data import checks
from jaxllm.data.checks import Log
from jaxllm.data.store import TokenStore
from jaxllm.data.tokenizer import BPE, Tokenizer, TokenizerSpec
from jaxllm.errors import UserError


@dataclass(frozen=True)
class Conversation:
    """Messages of a chat (role, content, and whatever else a template may ask for), and the file and line they are from."""

    messages: tuple[Mapping[str, Any], ...]
    where: str


# A document is a text, or pieces of (text, trained): tokens of an untrained piece are context, never labels; or a conversation.
Document = str | list[tuple[str, bool]] | Conversation
Encoder = Callable[[Conversation], tuple[list[int], list[bool]]]


@dataclass(frozen=True)
class Documents:
    """An opened source.

    identity: JSON facts that change whenever the documents do; part of the token cache's fingerprint.
    facts:    what a run should record about where its text came from.
    read:     starts a fresh pass over the documents, in an order that never changes.
    size:     bytes on disk, where known, for the progress line.
    masked:   whether some documents have untrained pieces.
    encoder:  of conversations: from the tokenizer, what gives the ids of one and which of them are trained.
    parts:    of a mix, its sources by name, which `read` goes through one after another.
    """

    identity: dict[str, Any]
    facts: dict[str, Any]
    read: Callable[[], Iterator[Document]]
    size: int | None = None
    masked: bool = False
    encoder: Callable[[Tokenizer], Encoder] | None = None
    parts: Mapping[str, "Documents"] = field(default_factory=dict)


class Part(NamedTuple):
    """One source of a mix: its documents among those of the corpus."""

    train: TokenStore
    val: TokenStore


@dataclass(frozen=True)
class Corpus:
    """Tokenised text, ready to load. `val` has no documents when `val_every` is 0.

    facts: documents, bytes, sha256 (of the UTF-8 text, each document followed by a zero byte), tokens, fingerprint and
    what the source adds (Python version, paths, ...). folder: where the tokens lie. parts, weights: of a mix, its sources by name and the
    share of training rows that each gets.
    """

    tokenizer: Tokenizer
    train: TokenStore
    val: TokenStore
    facts: dict[str, Any]
    folder: Path
    keep: tempfile.TemporaryDirectory[str] | None = None  # owns `folder` where no lasting cache could be written
    parts: Mapping[str, Part] = field(default_factory=dict)
    weights: Mapping[str, float] = field(default_factory=dict)


@dataclass(kw_only=True)
class Source(abc.ABC):
    """Fields that every source has.

    tokenizer: how text becomes tokens: `BPE`, `Bytes` or `TokenizerFile` of `jaxllm.data.tokenizer`.
    val_every: each `val_every`-th document is held out for validation; 0 holds out none.
    cache_dir: where tokens are kept; null = `$XDG_CACHE_HOME/jaxllm` or `~/.cache/jaxllm`.
    """

    tokenizer: TokenizerSpec = field(default_factory=BPE)
    val_every: int = 20
    cache_dir: str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.tokenizer, TokenizerSpec):
            raise UserError(
                f"data.tokenizer={self.tokenizer!r}: must be one of jaxllm.data.tokenizer.BPE, Bytes, "
                "TokenizerFile (data/tokenizer=bpe|bytes|file)"
            )
        checks.whole("data.val_every", self.val_every, least=0)
        if self.val_every == 1:
            raise UserError("data.val_every=1: would hold out every document; use 0 (none) or 2 and more")
        checks.word("data.cache_dir", self.cache_dir, optional=True)

    @abc.abstractmethod
    def open(self, base: Path, log: Log) -> Documents:
        """Finds the documents without reading them all. `base` is where relative paths start."""

    def outfit(self, tokenizer: Tokenizer, base: Path) -> Tokenizer:
        """The tokenizer with what this source adds to the files that travel with it (a chat template)."""
        del base
        return tokenizer

    def prepare(self, log: Log = None, base: str | os.PathLike[str] | None = None) -> Corpus:
        """Tokenises the source, or opens the tokens of an earlier run. `base`: the folder where the command was typed
        (default: the current one). Raises UserError for a missing or broken text and for a full disk."""
        from jaxllm.data.cache import prepare  # cache.py builds on the types above

        return prepare(self, Path(base) if base is not None else Path.cwd(), log)
