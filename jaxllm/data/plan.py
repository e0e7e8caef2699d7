"""The order of one epoch: which token lies where in the rows. Arrays of one number a document, never one a token.

    documents in a random order -> one stream of tokens -> row r = places [r t, (r + 1) t) -> rows in a random order

Cutting a stream uses every token of every document exactly once an epoch and pads only the end of the last row. The
label of a row's last token is the next token of the stream where that belongs to the same document, so no prediction
is lost at a cut either. Which document a place belongs to is found by bisection.
"""

from dataclasses import dataclass

import numpy as np

from jaxllm.data.store import TokenStore, starts_of


@dataclass(frozen=True)
class Plan:
    """One epoch. order: int64 [documents]. places: int64 [documents], where each of them starts in the stream.
    rows: int64 [n], or None for the plain order."""

    store: TokenStore
    seq_len: int
    order: np.ndarray
    places: np.ndarray
    rows: np.ndarray | None

    def gather(self, rows: np.ndarray, pad_id: int) -> dict[str, np.ndarray]:
        """Rows of the epoch as a batch; a row number of -1 gives a row of padding. See `Loader.batch`."""
        t, store, row = self.seq_len, self.store, self.numbers(rows)
        place = row[:, None] * t + np.arange(t + 1)  # one more than the row: the label of its last token
        slot = np.searchsorted(self.places, place, side="right") - 1
        document = self.order[slot]
        offset = place - self.places[slot]
        real = (row[:, None] >= 0) & (offset < store.lengths[document])
        index = np.where(real, store.starts[document] + offset, store.starts[self.order[0]])
        ids = np.where(real, store.tokens[index], 0).astype(np.int32)
        follows = real[:, 1:] & real[:, :-1] & (slot[:, 1:] == slot[:, :-1])
        trained = follows if store.trained is None else follows & (store.trained[index[:, 1:]] != 0)
        segments, positions = number(np.where(real, slot, -1)[:, :-1])
        return {
            "tokens": np.where(real[:, :-1], ids[:, :-1], np.int32(pad_id)),
            "labels": np.where(trained, ids[:, 1:], np.int32(0)),
            "positions": positions,
            "segments": segments,
            "weights": trained.astype(np.float32),
        }

    def numbers(self, rows: np.ndarray) -> np.ndarray:
        """Where rows of the epoch lie in its stream, counted in rows; -1 stays."""
        return rows if self.rows is None else np.where(rows < 0, -1, self.rows[rows])


def number(slot: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """int32 [b t] each: segments 1.. of a row, and positions from a segment's start in it; 0 where `slot` is -1."""
    real = slot >= 0
    first = real.copy()
    first[:, 1:] &= slot[:, 1:] != slot[:, :-1]
    begin = np.maximum.accumulate(np.where(first, np.arange(slot.shape[1]), 0), axis=1)
    segments = np.where(real, np.cumsum(first, axis=1), 0)
    positions = np.where(real, np.arange(slot.shape[1]) - begin, 0)
    return segments.astype(np.int32), positions.astype(np.int32)


def row_count(store: TokenStore, seq_len: int, align: int) -> int:
    """Rows of one epoch: the same in every one."""
    return -(-int(padded(store.lengths, align).sum()) // seq_len)


def make_plan(
    store: TokenStore, seq_len: int, align: int, seed: int, epoch: int, shuffle: bool, fixed: bool = False
) -> Plan:
    """The plan of one epoch, from nothing but its arguments. fixed: documents stay in their order, so rows are cut alike in every epoch."""
    order = shuffled(len(store), seed, epoch, 0) if shuffle and not fixed else np.arange(len(store))
    places = starts_of(padded(store.lengths[order], align))
    rows = shuffled(row_count(store, seq_len, align), seed, epoch, 1) if shuffle else None
    return Plan(store, seq_len, order, places, rows)


def padded(lengths: np.ndarray, align: int) -> np.ndarray:
    """Lengths rounded up to whole multiples of `align`."""
    return -(-lengths // align) * align


def shuffled(count: int, seed: int, epoch: int, purpose: int) -> np.ndarray:
    """int64 [count]: a random order. Made of a bit generator's raw stream, whose values NumPy promises to keep; those
    of `Generator.permutation` may change with its version, and a resumed run with them."""
    raw = np.random.Philox(np.random.SeedSequence([seed, epoch, purpose])).random_raw(count)
    return np.argsort(raw, kind="stable")
