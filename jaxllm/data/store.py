"""Tokens of many documents in one flat array, and the rule that divides the documents into training and validation."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class TokenStore:
    """Documents as slices of one array: document i is `tokens[starts[i] : starts[i] + lengths[i]]`, its `eos` included.

    tokens:  uint16 or uint32 [n], usually a read-only memory map, so a corpus may be larger than memory.
    starts, lengths: int64 [documents].
    trained: None, or uint8 [n]: 0 where a token is context only and never a label (the question of a question-answer
        pair, say).
    """

    tokens: np.ndarray
    starts: np.ndarray
    lengths: np.ndarray
    trained: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.starts)

    @property
    def size(self) -> int:
        """Tokens of all documents together."""
        return int(self.lengths.sum())

    def document(self, index: int) -> np.ndarray:
        """Tokens of one document."""
        return np.asarray(self.tokens[self.starts[index] : self.starts[index] + self.lengths[index]])

    def select(self, documents: np.ndarray | Sequence[int]) -> "TokenStore":
        """The same tokens, only these documents, in this order."""
        chosen = np.asarray(documents, np.int64)
        return TokenStore(self.tokens, self.starts[chosen], self.lengths[chosen], self.trained)

    @classmethod
    def of(cls, documents: Iterable[Sequence[int]]) -> "TokenStore":
        """A store in memory from ready token lists (each with its own `eos`)."""
        arrays = [np.asarray(d, np.uint32) for d in documents]
        lengths = np.array([len(a) for a in arrays], np.int64)
        return cls(np.concatenate([np.zeros(0, np.uint32), *arrays]), starts_of(lengths), lengths)


def starts_of(lengths: np.ndarray) -> np.ndarray:
    """int64 [n]: where each piece starts when they lie end to end."""
    starts = np.zeros(len(lengths), np.int64)
    np.cumsum(lengths[:-1], out=starts[1:])
    return starts


def is_validation(index: int, every: int) -> bool:
    """Whether document `index` (in corpus order) is held out: each `every`-th one; 0 holds out none."""
    return every > 0 and index % every == every - 1


def divide(store: TokenStore, every: int) -> tuple[TokenStore, TokenStore]:
    """(training, validation). Whole documents are held out, each `every`-th one.

    A corpus of fewer documents than `every` (one long text, often) has no such document: then the end of the longest
    one is held out, 1/every of all tokens but at most half of it. Nothing is in both parts.
    """
    if every == 0 or len(store) == 0:
        return store, store.select([])
    if len(store) >= every:
        held = np.arange(len(store)) % every == every - 1
        return store.select(np.flatnonzero(~held)), store.select(np.flatnonzero(held))
    longest = int(np.argmax(store.lengths))
    share = int(min(max(store.size // every, 2), store.lengths[longest] // 2))
    if share < 2:  # a single token predicts nothing
        return store, store.select([])
    lengths = store.lengths.copy()
    lengths[longest] -= share
    start = store.starts[[longest]] + lengths[longest]
    tail = TokenStore(store.tokens, start, np.array([share], np.int64), store.trained)
    return TokenStore(store.tokens, store.starts, lengths, store.trained), tail
