"""The k largest of many numbers by their threshold, without sorting them.

    T = the k-th largest value,        chosen = {s: x[s] > T}  and the first of  {s: x[s] = T}  up to k

T is found bit by bit: a float32 read as an integer (the lower bits turned round where it is negative) orders as the number does, and
whether at least k integers reach a trial T is one comparison and one count. The upper 16 bits are searched first, so that what is compared
is half as wide, and only until few numbers are left that T may be: those are taken out and compared with each other. A trial that parts
exactly k from the rest serves as T. Where more have the same upper bits (ties), the search goes on in the lower ones. A heap, as
`lax.top_k` keeps on a CPU, takes one number after the other and several times as long.

What is chosen is written as bits, 32 places a word; where the j-th set bit stands is a search in the running count of the words and then
in the word. So the result is ascending in place, which gathering likes, and nothing is scattered.

`Halves` holds the numbers of a row as it is filled from the left; only tiles that have something are looked at.

Shapes: `x [.. s]`, result `[.. k]`.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from flax import struct
from jax import Array, lax

WORD = 32
PIECES = 4, 16
FEW = 64  # numbers that are compared with each other rather than searched in
_LEAST16, _MOST16 = -(1 << 15), 1 << 15
LEAST = -(1 << 31)


def ordered(x: Array) -> Array:
    """float32 -> int32 that orders alike; -0.0 is 0.0, and -inf the least int32."""
    bits = lax.bitcast_convert_type(jnp.where(x == 0, 0.0, x).astype(jnp.float32), jnp.int32)
    return jnp.where(x > -jnp.inf, bits ^ ((bits >> 31) & 0x7FFFFFFF), LEAST)


def at_places(x: Array, index: Array, beyond: int) -> Array:
    """`x [.. s]` at `index [.. m]`; `beyond` where that is past the end."""
    return jnp.take_along_axis(x, index, axis=-1, mode="fill", fill_value=beyond)


@struct.dataclass
class Halves:
    """Numbers as `ordered` writes them by their upper and lower 16 bits, each int16 `[m .. tile]`: m tiles, a multiple of 32 wide.

    Tiles come first so that each is one piece of memory; a CPU walks a slice of rows number by number.
    count: so many tiles are looked at, int32; None = all.
    """

    upper: Array
    lower: Array
    count: Array | None = None

    @classmethod
    def of(cls, keys: Array, tile: int) -> "Halves":
        """Of int32 `[.. s]`; what is missing to the end of the last tile is the least number."""
        pad = [(0, 0)] * (keys.ndim - 1) + [(0, -keys.shape[-1] % tile)]
        keys = jnp.pad(keys, pad, constant_values=LEAST)
        keys = jnp.moveaxis(keys.reshape(*keys.shape[:-1], -1, tile), -2, 0)
        return cls((keys >> 16).astype(jnp.int16), ((keys & 0xFFFF) + _LEAST16).astype(jnp.int16))

    @classmethod
    def empty(cls, *shape: int) -> "Halves":
        """The least number everywhere."""
        return cls(jnp.full(shape, _LEAST16, jnp.int16), jnp.full(shape, _LEAST16, jnp.int16))

    @property
    def tile(self) -> int:
        return self.upper.shape[-1]

    def no_words(self) -> Array:
        """A bit for each number, not set: uint32 `[m .. tile/32]`."""
        return jnp.zeros((*self.upper.shape[:-1], self.tile // WORD), jnp.uint32)

    def write(self, keys: Array, start: Array) -> "Halves":
        """int32 keys `[.. part]` from place `start` on, within a tile."""
        new = Halves.of(keys, keys.shape[-1])
        at: list[Any] = [start // self.tile, *[0] * (keys.ndim - 1), start % self.tile]
        return dataclasses.replace(
            self,
            upper=lax.dynamic_update_slice(self.upper, new.upper, at),
            lower=lax.dynamic_update_slice(self.lower, new.lower, at),
        )

    def at(self, index: Array) -> Array:
        """The numbers at places `index [.. m]`, int32; the least beyond the end."""
        upper, lower = (at_places(in_rows(x), index, _LEAST16).astype(jnp.int32) for x in (self.upper, self.lower))
        return (upper << 16) | (lower - _LEAST16)

    def fold(self, f: Callable[[Array, Array, Array, Any], Any], start: Any) -> Any:
        """`f(tile's number, upper, lower, state)` from tile to tile."""
        m = self.upper.shape[0]
        if m == 1:
            return f(jnp.int32(0), self.upper[0], self.lower[0], start)

        def one(i: Array, state: Any) -> Any:
            upper, lower = (lax.dynamic_index_in_dim(x, i, 0, keepdims=False) for x in (self.upper, self.lower))
            return f(i, upper, lower, state)

        return lax.fori_loop(0, m if self.count is None else self.count, one, start)


def in_rows(tiles: Array) -> Array:
    """`[m .. n]` -> `[.. m n]`."""
    return jnp.moveaxis(tiles, 0, -2).reshape(*tiles.shape[1:-1], -1)


def _sum(mask: Array) -> Array:
    """How many of `mask [.. s]` are set: int32 `[.. 1]`.

    Pieces of each row are added to each other first: XLA on a CPU does that in vectors, and adds the numbers of a row to one sum one after
    the other. By two steps, 64 pieces in all, it takes half as long as by 8.
    """
    *lead, s = mask.shape
    pieces = PIECES if s % math.prod(PIECES) == 0 else (8,)
    inside = mask.astype(jnp.int16).reshape(*lead, *pieces, -1)
    for _ in pieces:
        inside = jnp.sum(inside, axis=len(lead), dtype=jnp.int16)
    return jnp.sum(inside, axis=-1, keepdims=True, dtype=jnp.int32)


@struct.dataclass
class Bracket:
    """Each row's T lies in `least <= T < most` (upper 16 bits, int32 `[.. 1]`), which so many numbers reach: `reach >= k > beyond`.

    Where fewer than k numbers are above the least of all, `least` stands below them and `reach` is their count.
    """

    least: Array
    most: Array
    reach: Array
    beyond: Array

    def done(self, k: int) -> Array:
        """Whether `least` will do as T: k numbers reach it, or fewer do and there are no others."""
        return self.reach <= k


def bracket(x: Halves, k: int, few: int) -> Bracket:
    """By halves, until T is found or there are at most `few` numbers to look among, for every row."""
    none = jnp.zeros((*x.upper.shape[1:-1], 1), jnp.int32)

    def count(least: Array) -> Array:
        return x.fold(lambda i, upper, lower, n: n + _sum(upper >= least.astype(jnp.int16)), none)

    def wanted(at: tuple[Array, Bracket]) -> Array:
        step, now = at
        return (step > 0) & jnp.any(~now.done(k) & (now.reach - now.beyond > few))

    def halve(at: tuple[Array, Bracket]) -> tuple[Array, Bracket]:
        step, now = at
        trial = now.least + step
        n = count(trial)
        up, down = ~now.done(k) & (n >= k), ~now.done(k) & (n < k)
        least, reach = (jnp.where(up, new, old) for new, old in ((trial, now.least), (n, now.reach)))
        most, beyond = (jnp.where(down, new, old) for new, old in ((trial, now.most), (n, now.beyond)))
        return step >> 1, Bracket(least, most, reach, beyond)

    least = none + _LEAST16 + 1  # what is not the least number of all
    start = Bracket(least, none + _MOST16, count(least), none)
    return lax.while_loop(wanted, halve, (jnp.int32(1 << 15), start))[1]


def among_few(x: Halves, at: Bracket, k: int, few: int) -> Array:
    """T, int32 `[.. 1]`, where a bracket holds at most `few` numbers: they are taken out and compared with each other."""
    least, most = at.least.astype(jnp.int16), (at.most - 1).astype(jnp.int16)

    def mark(i: Array, upper: Array, lower: Array, words: Array) -> Array:
        inside = (upper >= least) & (upper <= most)
        return lax.dynamic_update_index_in_dim(words, packed(inside), i, 0)

    words = in_rows(x.fold(mark, x.no_words()))
    numbers = x.at(place_of_bit(words, jnp.broadcast_to(jnp.arange(few, dtype=jnp.int32), (*words.shape[:-1], few))))
    rank = jnp.sum(numbers[..., None, :] >= numbers[..., None], axis=-1, dtype=jnp.int32)
    found = jnp.max(jnp.where(rank >= k - at.beyond, numbers, LEAST), axis=-1, keepdims=True)
    return jnp.where(at.done(k), at.least << 16, found)


def by_lower_bits(x: Halves, at: Bracket, k: int) -> Array:
    """T, int32 `[.. 1]`, where a bracket is one value of the upper bits, or done: bit by bit of the lower ones of whom it holds."""
    none, high = jnp.zeros_like(at.least), at.least.astype(jnp.int16)

    def split(i: Array, upper: Array, lower: Array, state: tuple[Array, Array]) -> tuple[Array, Array]:
        level = jnp.where(upper == high, lower, _LEAST16).astype(jnp.int16)
        return state[0] + _sum(upper > high), lax.dynamic_update_index_in_dim(state[1], level, i, 0)

    above, level = x.fold(split, (none, jnp.zeros_like(x.lower)))
    y = dataclasses.replace(x, lower=level)

    def bit(step: Array, least: Array) -> Array:
        trial = least + step
        n = y.fold(lambda i, upper, lower, n: n + _sum(lower >= trial.astype(jnp.int16)), none)
        return jnp.where(above + n >= k, trial, least)

    low = lax.fori_loop(0, 16, lambda i, least: bit(jnp.int32(1 << 15) >> i, least), none + _LEAST16)
    return (at.least << 16) | (low - _LEAST16)


def threshold(x: Halves, k: int, few: int = FEW) -> Array:
    """A T, int32 `[.. 1]`, that exactly k numbers reach, or else the largest that more do; where fewer than k numbers are above the least
    of all, one that they reach."""
    at = bracket(x, k, few)
    enough = jnp.all(at.done(k) | (at.reach - at.beyond <= few))
    return lax.cond(enough, lambda: among_few(x, at, k, few), lambda: by_lower_bits(x, at, k))


def packed(mask: Array) -> Array:
    """bool `[.. s]`, s a multiple of 32 -> uint32 `[.. s/32]`, the first place in the lowest bit."""
    bits = mask.reshape(*mask.shape[:-1], -1, WORD).astype(jnp.uint32) << jnp.arange(WORD, dtype=jnp.uint32)
    return jnp.sum(bits, axis=-1, dtype=jnp.uint32)


def ones(words: Array) -> Array:
    """The number of set bits of each, int32."""
    return lax.population_count(words).astype(jnp.int32)


def place_of_bit(words: Array, j: Array) -> Array:
    """Where the j-th set bit of `words [.. w]` stands, counted from 0: `j [.. m]` -> int32; 32 w or more where there is none."""
    w = words.shape[-1]
    until = jnp.cumsum(ones(words), axis=-1)

    def at_row(x: Array, row: Array) -> Array:
        return jnp.take_along_axis(x, row, axis=-1, mode="promise_in_bounds")

    at = jnp.zeros(j.shape, jnp.int32)
    for power in reversed(range(w.bit_length())):  # of the words that end before the bit
        far = at + (1 << power)
        at = jnp.where((far <= w) & (at_row(until, jnp.minimum(far, w) - 1) <= j), far, at)
    word = at_row(words, jnp.minimum(at, w - 1))
    left = j - jnp.where(at > 0, at_row(until, jnp.maximum(at, 1) - 1), 0)
    place = jnp.zeros(j.shape, jnp.int32)
    for power in reversed(range(5)):
        half = jnp.uint32((1 << (1 << power)) - 1)
        low = ones((word >> place.astype(jnp.uint32)) & half)
        beyond = left >= low
        place, left = jnp.where(beyond, place + (1 << power), place), jnp.where(beyond, left - low, left)
    return at * WORD + place


def places(x: Halves, k: int) -> Array:
    """Places of the k largest that are above the least, ascending, int32 `[.. k]`; of equals the first.

    Where there are fewer, the places after the last of them are beyond all tiles.
    """
    level = threshold(x, k)
    high, low = (level >> 16).astype(jnp.int16), ((level & 0xFFFF) + _LEAST16).astype(jnp.int16)
    lead, words = x.upper.shape[1:-1], x.no_words()

    def mark(i: Array, upper: Array, lower: Array, state: tuple[Array, Array]) -> tuple[Array, Array]:
        same = upper == high
        above = (upper > high) | (same & (lower > low))
        equal = same & (lower == low) & ((upper > _LEAST16) | (lower > _LEAST16))
        put = lax.dynamic_update_index_in_dim
        return put(state[0], packed(above), i, 0), put(state[1], packed(equal), i, 0)

    above, equal = (in_rows(marks) for marks in x.fold(mark, (words, words)))
    wanted = k - jnp.sum(ones(above), axis=-1, keepdims=True)  # of the equals
    last = place_of_bit(equal, jnp.maximum(wanted - 1, 0))
    first = jnp.arange(above.shape[-1], dtype=jnp.int32) * WORD
    until = jnp.clip(last + 1 - first, 0, WORD).astype(jnp.uint32)  # so many low bits of each word
    lows = jnp.where(until == WORD, ~jnp.uint32(0), (jnp.uint32(1) << (until % WORD)) - 1)
    chosen = above | jnp.where(wanted > 0, equal & lows, jnp.uint32(0))
    return place_of_bit(chosen, jnp.broadcast_to(jnp.arange(k, dtype=jnp.int32), (*lead, k)))


def largest(keys: Array, k: int) -> Array:
    """`places` of int32 `[.. s]`, any s."""
    return places(Halves.of(keys, -(-keys.shape[-1] // WORD) * WORD), k)
