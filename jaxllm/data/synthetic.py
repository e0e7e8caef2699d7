"""Made-up tasks with a known right answer: copying, and recalling values by their keys.

    copy    `kqzvb=kqzvb`           after `=` every symbol is decided by the one before the sign
    recall  `a3k7z1?k7a3z1`         pairs key, value; after `?` every value is decided by its key
            `.+a3;~=k7-z1!?k7a3z1`  the same among filler: needles in a haystack

Both ask what a mechanism can carry over a distance (associative recall: Arora et al. 2023, "Zoology"). The right loss
on the answers is 0; with `answers_only` nothing else is trained, so the loss reads as the share not yet learned.
"""

import string
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from jaxllm.data import checks
from jaxllm.data.checks import Log
from jaxllm.data.corpus import Document, Documents, Source
from jaxllm.data.tokenizer import Bytes, TokenizerSpec
from jaxllm.errors import UserError

KEYS = string.ascii_letters
VALUES = string.digits
FILLER = "!#$%&*+,-./:;<=>@^_~"
TASKS = ("recall", "copy")


@dataclass
class Synthetic(Source):
    """`documents` random instances of one task.

    length: symbols to copy, or key-value pairs to recall (at most 52, keys are distinct letters).
    queries: how many of the pairs are asked for; null asks for all. Only for recall.
    filler: random symbols among which the pairs lie, at random places. Only for recall.
    answers_only: train the answers alone, not the random symbols that nothing can predict.
    """

    tokenizer: TokenizerSpec = field(default_factory=Bytes)
    task: str = "recall"
    documents: int = 4000
    length: int = 8
    queries: int | None = None
    filler: int = 0
    answers_only: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.task not in TASKS:
            raise UserError(f"data.task={self.task!r}: must be one of {', '.join(TASKS)}")
        checks.whole("data.documents", self.documents, least=1)
        checks.whole("data.length", self.length, least=1)
        checks.whole("data.seed", self.seed, least=0)
        checks.whole("data.queries", self.queries, least=1, optional=True)
        checks.whole("data.filler", self.filler, least=0)
        checks.flag("data.answers_only", self.answers_only)
        if self.task == "recall" and self.length > len(KEYS):
            raise UserError(f"data.length={self.length}: recall has {len(KEYS)} distinct keys")
        if self.filler and self.task != "recall":
            raise UserError(f"data.filler={self.filler}: only for task=recall; leave it at 0")
        if self.queries is not None and (self.task != "recall" or self.queries > self.length):
            raise UserError(f"data.queries={self.queries}: only for task=recall, and at most data.length={self.length}")

    def open(self, base: Path, log: Log) -> Documents:
        facts = {
            "source": "synthetic",
            "task": self.task,
            "length": self.length,
            "queries": self.queries,
            "filler": self.filler,
            "answers_only": self.answers_only,
            "seed": self.seed,
        }
        return Documents(facts | {"count": self.documents}, facts, self._read, masked=self.answers_only)

    def _read(self) -> Iterator[Document]:
        rng = np.random.default_rng(self.seed)
        make = self._copy if self.task == "copy" else self._recall
        for _ in range(self.documents):
            pieces = make(rng)
            yield pieces if self.answers_only else "".join(text for text, _ in pieces)

    def _copy(self, rng: np.random.Generator) -> list[tuple[str, bool]]:
        text = "".join(KEYS[i] for i in rng.integers(len(KEYS), size=self.length))
        return [(text + "=", False), (text, True)]

    def _recall(self, rng: np.random.Generator) -> list[tuple[str, bool]]:
        keys = [KEYS[i] for i in rng.permutation(len(KEYS))[: self.length]]
        values = [VALUES[i] for i in rng.integers(len(VALUES), size=self.length)]
        asked = rng.permutation(self.length)[: self.queries]
        pairs = [k + v for k, v in zip(keys, values, strict=True)]
        gaps = np.sort(rng.integers(self.filler + 1, size=len(pairs))) if self.filler else [0] * len(pairs)
        question = haystack(rng, pairs, gaps, self.filler) + "?"
        pieces = [(question, False)]
        for i in asked:
            pieces += [(keys[i], False), (values[i], True)]
        return pieces


def haystack(rng: np.random.Generator, pairs: Sequence[str], gaps: Sequence[int] | np.ndarray, filler: int) -> str:
    """`filler` random symbols, with pair i behind the first `gaps[i]` of them; gaps must not fall."""
    hay = [FILLER[i] for i in rng.integers(len(FILLER), size=filler)] if filler else []
    for pair, gap in zip(reversed(pairs), reversed(list(gaps)), strict=True):
        hay.insert(gap, pair)
    return "".join(hay)
