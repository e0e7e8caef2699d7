"""Several sources in one corpus, and batches that hold them in given proportions.

    weights w_i -> a period of `PERIOD` rows in which source i has round(PERIOD w_i / sum w) of them, spread evenly
    row r of a run's endless list belongs to the source that stands at r mod PERIOD, and is the next row of that source's own list

A mix is tokenised like any corpus, one source after another, with one tokenizer trained on all of them; weights decide nothing there, so
another mix of the same sources finds its tokens ready. Each source holds out its own documents, shuffles by itself and starts over by
itself when it has ended: how many passes it has had follows from the row, and so does everything else. Proportions are of rows, which are
full, hence of tokens; in any stretch of rows each source has its share to within a row or two.
"""

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from jaxllm.data.checks import Log
from jaxllm.data.corpus import Corpus, Document, Documents, Source
from jaxllm.data.loader import Batch, Loader
from jaxllm.data.prefetch import Prefetch
from jaxllm.data.vocabulary import Tokenizer
from jaxllm.errors import UserError

PERIOD = 1024


@dataclass(kw_only=True)
class Mix(Source):
    """sources: by name, any of this package's; their own tokenizer, val_every and cache_dir give way to the mix's. weights: by name, the
    share of training rows that each gets, in any unit; null = as many as it has tokens."""

    sources: Mapping[str, Source] = field(default_factory=dict)
    weights: Mapping[str, float] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.sources:
            raise UserError("data.sources: empty; name at least one, data.sources.NAME={_target_: ..., ...}")
        for name, source in self.sources.items():
            if not isinstance(source, Source) or isinstance(source, Mix):
                raise UserError(f"data.sources.{name}: is no source of text; give a node like those in conf/data")
        if self.weights is None:
            return
        for name in (*self.weights, *self.sources):
            if name not in self.sources or name not in self.weights:
                where = "weights" if name in self.sources else "sources"
                raise UserError(
                    f"data.weights.{name}: no {where[:-1]} of that name; data.{where} has {', '.join(getattr(self, where))}"
                )
        for name, weight in self.weights.items():
            if not 0 < weight < float("inf"):
                raise UserError(f"data.weights.{name}: {weight} must be above 0; leave a source out to drop it")

    def open(self, base: Path, log: Log) -> Documents:
        parts = {name: source.open(base, log) for name, source in self.sources.items()}

        def read() -> Iterator[Document]:
            return itertools.chain.from_iterable(part.read() for part in parts.values())

        sizes = [part.size for part in parts.values()]
        return Documents(
            identity={"parts": {name: part.identity for name, part in parts.items()}},
            facts={"source": "mix", "sources": {name: part.facts for name, part in parts.items()}},
            read=read,
            size=None if None in sizes else sum(size or 0 for size in sizes),
            masked=any(part.masked for part in parts.values()),
            parts=parts,
        )

    def outfit(self, tokenizer: Tokenizer, base: Path) -> Tokenizer:
        for source in self.sources.values():
            tokenizer = source.outfit(tokenizer, base)
        return tokenizer

    def prepare(self, log: Log = None, base: Any = None) -> Corpus:
        corpus = super().prepare(log, base)
        weights = self.weights or {name: float(part.train.size) for name, part in corpus.parts.items()}
        shares = {name: weights[name] / sum(weights.values()) for name in corpus.parts}
        return replace(corpus, weights=shares, facts=corpus.facts | {"weights": shares})


def schedule(weights: Mapping[str, float]) -> np.ndarray:
    """int64 `[PERIOD]`: which source, by number, each row of a period belongs to. Every source has at least one."""
    if len(weights) > PERIOD:
        raise UserError(f"data.sources: {len(weights)} sources; a mix has at most {PERIOD}, one row of a period each")
    exact = np.array(list(weights.values()), np.float64)
    exact *= PERIOD / exact.sum()
    counts = np.maximum(np.floor(exact), 1).astype(np.int64)
    while counts.sum() > PERIOD:
        counts[np.argmax(np.where(counts > 1, counts - exact, -np.inf))] -= 1
    while counts.sum() < PERIOD:
        counts[np.argmax(exact - counts)] += 1
    # Row n of m of a source stands at (n + 1/2) / m of the period; ties go to the source named first.
    places = np.concatenate([(np.arange(m) + 0.5) / m for m in counts])
    return np.repeat(np.arange(len(counts)), counts)[np.argsort(places, kind="stable")]


class MixLoader:
    """The rows of several loaders, in the order of a schedule; see `Loader`, whose interface it has.

    Row r of the run is row `before(r)[i]` of its source i: how many of the rows before it were i's.
    """

    def __init__(self, loaders: Mapping[str, Loader], weights: Mapping[str, float]):
        self.loaders, self.weights = dict(loaders), {name: float(weights[name]) for name in loaders}
        first = next(iter(self.loaders.values()))
        self.batch_size, self.seq_len, self.host, self.hosts = first.batch_size, first.seq_len, first.host, first.hosts
        self.schedule = schedule(self.weights)
        one = self.schedule[:, None] == np.arange(len(self.loaders))
        self._before = np.concatenate([np.zeros((1, len(self.loaders)), np.int64), np.cumsum(one, axis=0)])

    @property
    def rows_per_epoch(self) -> int:
        """Rows until the source that ends first for its share has been read once."""
        shares = np.bincount(self.schedule) / PERIOD
        return int(min(loader.rows_per_epoch / s for loader, s in zip(self.loaders.values(), shares, strict=True)))

    def before(self, row: np.ndarray) -> np.ndarray:
        """int64 `[.. sources]`: rows of each source among the first `row` rows of the run."""
        return (row // PERIOD)[..., None] * self._before[-1] + self._before[row % PERIOD]

    def batch(self, step: int) -> Batch:
        """This host's part of a step: see `Loader.batch`."""
        share = self.batch_size // self.hosts
        rows = step * self.batch_size + self.host * share + np.arange(share, dtype=np.int64)
        source, own = self.schedule[rows % PERIOD], self.before(rows)
        out: Batch = {}
        for i, loader in enumerate(self.loaders.values()):
            at = np.flatnonzero(source == i)
            if len(at):
                for name, values in loader.rows(own[at, i]).items():
                    out.setdefault(name, np.zeros((share, *values.shape[1:]), values.dtype))[at] = values
        return out

    def prefetch(self, start: int, depth: int = 2, stop: int | None = None) -> Prefetch[Batch]:
        """See `Loader.prefetch`."""
        return Prefetch(self.batch, start, depth, stop)

    def facts(self) -> dict[str, Any]:
        """What decides the order of tokens."""
        return {"weights": self.weights, "sources": {name: loader.facts() for name, loader in self.loaders.items()}}

    def position(self, step: int) -> dict[str, Any]:
        """Where the data stands before a step: rows taken of each source, and how many passes over it those are."""
        taken = self.before(np.array(step * self.batch_size, np.int64))
        return {
            name: {"rows": int(n), "epochs": int(n) / loader.rows_per_epoch}
            for (name, loader), n in zip(self.loaders.items(), taken, strict=True)
        }
