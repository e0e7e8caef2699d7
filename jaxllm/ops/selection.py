"""The k largest of many numbers by their threshold, without sorting them.

    T = the k-th largest value,        chosen = {s: x[s] > T}  and the first of  {s: x[s] = T}  up to k

T is found bit by bit: a float32 read as an integer (the lower bits turned round where it is negative) orders as the number does, and
whether at least k integers reach a trial T is one comparison and one count. The upper 16 bits come first and then the lower ones, so that
what is compared is half as wide; where a trial parts exactly k from the rest for every query, it serves as T. A heap, as `lax.top_k`
keeps on a CPU, takes one number after the other and several times as long.

What is chosen is written as bits, 32 places a word; where the j-th set bit stands is a search in the running count of the words and then
in the word. So the result is ascending in place, which gathering likes, and nothing is scattered.

Shapes: `x [.. s]`, result `[.. k]`.
"""

import jax.numpy as jnp
from jax import Array, lax

WORD = 32
_LEAST16 = -(1 << 15)
_LEAST32 = -(1 << 31)


def ordered(x: Array) -> Array:
    """float32 -> int32 that orders alike; -0.0 is 0.0, and -inf the least int32."""
    bits = lax.bitcast_convert_type(jnp.where(x == 0, 0.0, x).astype(jnp.float32), jnp.int32)
    return jnp.where(x > -jnp.inf, bits ^ ((bits >> 31) & 0x7FFFFFFF), _LEAST32)


def _counted(x: Array, least: Array) -> Array:
    """How many of `x [.. s]` (int16) reach `least [.. 1]`: int32 `[.. 1]`.

    Eight pieces of each row are added to each other first: XLA on a CPU does that in vectors, and adds the numbers of a row to one sum
    one after the other, which takes twice as long.
    """
    s, pieces = x.shape[-1], 8
    inside = (x >= least).astype(jnp.int16).reshape(*x.shape[:-1], pieces, s // pieces)
    return jnp.sum(jnp.sum(inside, axis=-2, dtype=jnp.int16), axis=-1, keepdims=True, dtype=jnp.int32)


def _reached(x: Array, k: Array) -> Array:
    """A T that `k [.. 1]` of `x [.. s]` (int16) reach: one that exactly so many do, or else the largest that more do; the least
    int16, which all reach, where it takes that."""

    def bit(state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        step, least, found = state
        trial = jnp.where(found, least, least + step)
        count = _counted(x, trial.astype(jnp.int16))
        return step >> 1, jnp.where(count >= k, trial, least), found | (count == k)

    start = jnp.int32(1 << 15), jnp.full(k.shape, _LEAST16, jnp.int32), jnp.zeros(k.shape, bool)
    return lax.while_loop(lambda state: (state[0] > 0) & ~jnp.all(state[2]), bit, start)[1]


def threshold(keys: Array, k: int) -> Array:
    """A T `[.. 1]` that k of `keys [.. s]` (int32) reach, or else the largest that more do."""
    upper = (keys >> 16).astype(jnp.int16)
    high = _reached(upper, jnp.full((*keys.shape[:-1], 1), k, jnp.int32))
    level = high.astype(jnp.int16)
    rest = k - jnp.sum(upper > level, axis=-1, keepdims=True, dtype=jnp.int32)
    lower = ((keys & 0xFFFF) + _LEAST16).astype(jnp.int16)
    low = _reached(jnp.where(upper == level, lower, _LEAST16).astype(jnp.int16), rest)
    return (high << 16) | (low - _LEAST16)


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


def largest(x: Array, k: int) -> Array:
    """Places of the k largest of `x [.. s]` that are above -inf, ascending, int32 `[.. k]`; of equals the first.

    Where fewer are above -inf, the places after the last of them are s or more.
    """
    *lead, s = x.shape
    keys = jnp.pad(ordered(x), (*[(0, 0)] * len(lead), (0, -s % WORD)), constant_values=_LEAST32)
    level = threshold(keys, k)
    above, equal = packed(keys > level), packed((keys == level) & (keys > _LEAST32))
    wanted = k - jnp.sum(ones(above), axis=-1, keepdims=True)  # of the equals
    last = place_of_bit(equal, jnp.maximum(wanted - 1, 0))
    first = jnp.arange(above.shape[-1], dtype=jnp.int32) * WORD
    until = jnp.clip(last + 1 - first, 0, WORD).astype(jnp.uint32)  # so many low bits of each word
    low = jnp.where(until == WORD, ~jnp.uint32(0), (jnp.uint32(1) << (until % WORD)) - 1)
    chosen = above | jnp.where(wanted > 0, equal & low, jnp.uint32(0))
    return place_of_bit(chosen, jnp.broadcast_to(jnp.arange(k, dtype=jnp.int32), (*lead, k)))
