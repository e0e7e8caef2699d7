"""Caches as pytrees and their pure operations.

A cache keeps no length of its own: `Context.rows.lengths` says what is committed, absolute positions decide what is visible.
*Verify and commit*: the last `tentative` tokens of a call may be rejected; the next call's `accepted` commits some of them.
Attention caches need nothing for that (the next call writes over what was not accepted); recurrent ones replay: see `replay`.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import Array

from jaxllm.errors import UserError


@struct.dataclass
class KVCache:
    """Contiguous keys `[b, g, s, k]` and values `[b, g, s, v]`; the token at position p lies at index p of s.

    There is no axis g where there is one kv head: see `per_head` in `jaxllm/ops/attention.py`.
    """

    k: Array
    v: Array

    @classmethod
    def zeros(cls, b: int, g: int, s: int, k: int, v: int, dtype: Any) -> "KVCache":
        heads = () if g == 1 else (g,)
        return cls(jnp.zeros((b, *heads, s, k), dtype), jnp.zeros((b, *heads, s, v), dtype))

    @property
    def capacity(self) -> int:
        return self.k.shape[-2]


@struct.dataclass
class LatentCache:
    """Latents `[b, s, r]` after their norm and shared keys `[b, s, o]` after their rotation (MLA); position p lies at index p of s.

    Two arrays, because attention reads the latents twice and the keys once, and a slice of one array would be copied.
    """

    latent: Array
    key: Array

    @classmethod
    def zeros(cls, b: int, s: int, r: int, o: int, dtype: Any) -> "LatentCache":
        return cls(jnp.zeros((b, s, r), dtype), jnp.zeros((b, s, o), dtype))

    @property
    def capacity(self) -> int:
        return self.latent.shape[-2]


@struct.dataclass
class IndexedCache:
    """What a mixer caches by itself, `held`, and beside it an indexer's keys `index [b, s // m, k]`, of pools of m tokens.

    Pool w lies at index w. recent: what the next pools will be made of, a ring `[b, R, 2k]`; None where m is 1.
    """

    held: "KVCache | LatentCache"
    index: Array
    recent: Array | None = None

    @property
    def capacity(self) -> int:
        return self.held.capacity


EMPTY = 2**30  # position of a slot that holds nothing: later than every query


@struct.dataclass
class RingCache:
    """Keys `[b, g, R, k]` and values `[b, g, R, v]` of the newest tokens, for layers that see no farther back.

    `positions`, int32 `[b, R]`, says which token a slot holds: what is visible is decided by it, never by how full the ring is. The
    first `keep` slots are kept for positions 0..keep-1 (global tokens); position p >= keep lies at `keep + (p - keep) mod (R - keep)`.
    A tentative token that was rejected stays in its slot until its position is written again, and no query comes before that; the
    `draft` slots beyond the span are there because it took the place of a token that is still needed otherwise.
    """

    k: Array
    v: Array
    positions: Array

    @classmethod
    def zeros(cls, b: int, g: int, s: int, k: int, v: int, dtype: Any) -> "RingCache":
        room = KVCache.zeros(b, g, s, k, v, dtype)
        return cls(room.k, room.v, jnp.full((b, s), EMPTY, jnp.int32))

    @property
    def capacity(self) -> int:
        return self.k.shape[-2]

    def write(self, k: Array, v: Array, positions: Array, valid: Array, end: Array, keep: int = 0) -> "RingCache":
        """Put in `k [b g t k]`, `v [b g t v]` of the tokens at `positions [b t]`, the last of which is before `end [b]`.

        Of more tokens than the ring holds the newest stay.
        """
        ring = max(self.capacity - keep, 1)
        valid = valid & ((positions < keep) | (positions >= end[:, None] - ring))
        slots = jnp.where(positions < keep, positions, keep + (positions - keep) % ring)
        held = write(self.positions[:, :, None], positions[:, None, :, None], slots, valid)[..., 0]
        return RingCache(write(self.k, k, slots, valid), write(self.v, v, slots, valid), held)


def write(buffer: Array, update: Array, positions: Array, valid: Array) -> Array:
    """Write `update [b, g, t, k]` into `buffer [b, (g,) s, k]` at `positions [b, t]`, in place when the buffer is donated.

    Tokens that are not `valid`, and positions beyond the capacity, are dropped: a caller checks the capacity on the host with
    `check_capacity` before it calls. The scatter always carries one extra, dropped row, because XLA turns a single-row scatter
    into select + dynamic-update-slice in two fusions and copies the whole buffer.
    """
    b, g, t, k = update.shape
    s = buffer.shape[-2]
    index = jnp.where(valid & (positions >= 0), positions, s)
    index = jnp.broadcast_to(index[:, None], (b, g, t)).reshape(-1)
    lane = jnp.repeat(jnp.arange(b * g, dtype=jnp.int32), t)
    index = jnp.concatenate([index, jnp.full(1, s, index.dtype)])
    lane = jnp.concatenate([lane, jnp.zeros(1, lane.dtype)])
    rows = jnp.concatenate([update.reshape(b * g * t, k), jnp.zeros((1, k), update.dtype)]).astype(buffer.dtype)
    return buffer.reshape(b * g, s, k).at[lane, index].set(rows, mode="drop").reshape(buffer.shape)


@struct.dataclass
class RecurrentCache:
    """What a linear-attention layer remembers of a row, whatever its length, as of the last committed token.

    state: fp32 `[b, h, k, v]`. window: the last inputs of the short convolutions, `[b, taps - 1, c]`. pending: what the layer projected
    of the tokens that may still be rejected, `[b, draft, m]`: the next call runs the accepted ones again (`replay`).
    """

    state: Array
    window: Array
    pending: Array

    @classmethod
    def zeros(
        cls, state: tuple[int, int, int, int], window: int, channels: int, pending: int, draft: int, dtype: Any
    ) -> "RecurrentCache":
        b = state[0]
        return cls(
            jnp.zeros(state, jnp.float32),
            jnp.zeros((b, window, channels), dtype),
            jnp.zeros((b, draft, pending), dtype),
        )


def recent_slots(tokens: int, draft: int) -> int:
    """Slots of a ring that keeps the last `tokens` committed tokens while `draft` more may be rejected."""
    return max(tokens + draft, 1)


def read_recent(ring: Array, lengths: Array, tokens: int) -> Array:
    """The last `tokens` before `lengths [b]` in order, `[b tokens w]`, of a ring `[b R w]` in which position p lies at p mod R.

    Positions below 0 give any row. A tentative token took the slot of none that is read here: R is at least `tokens` plus the drafts.
    """
    slots = (lengths[:, None] - tokens + jnp.arange(tokens, dtype=jnp.int32)) % ring.shape[1]
    return jnp.take_along_axis(ring, slots[..., None], axis=1)


def write_recent(ring: Array, update: Array, positions: Array, valid: Array, end: Array) -> Array:
    """Put the tokens `update [b t w]` at `positions [b t]` into a ring, of more than it holds the newest; the last is before `end [b]`."""
    size = ring.shape[1]
    return write(ring, update[:, None], positions % size, valid & (positions >= end[:, None] - size))


@struct.dataclass
class CompressedCache:
    """Compressed attention's state of a row (DeepSeek-V4, CSA and HCA).

    window: keys of the newest tokens, a ring `[b, R, k]`. recent: what the next windows will be pooled of, a ring `[b, Q, w]`. entries:
    `[b, s // m, k]`, that of window w at index w. index: keys of an indexer beside them, `[b, s // m, i]`. Fields that a layer has no
    use for are None.
    """

    window: Array
    recent: Array | None
    entries: Array | None
    index: Array | None


@struct.dataclass
class UnrolledCache:
    """What a draft layer remembers while it is trained unrolled over its own outputs (`jaxllm.ops.unroll`).

    keys, values: one `[b t g k]`, `[b t g v]` a step, step 0 first. segments `[b t]`: the documents of step 0; None before it.
    """

    keys: tuple[Array, ...] = ()
    values: tuple[Array, ...] = ()
    segments: Array | None = None

    @property
    def steps(self) -> int:
        return len(self.keys)

    def add(self, key: Array, value: Array, segments: Array) -> "UnrolledCache":
        """With the keys and values of one more step, whose queries lie in `segments`."""
        first = segments if self.segments is None else self.segments
        return UnrolledCache((*self.keys, key), (*self.values, value), first)


def check_capacity(capacity: int, lengths: Any, new: Any) -> None:
    """Refuse, on the host, a call that would write past the end. `lengths` and `new` are integers or host arrays."""
    end = int((np.asarray(lengths) + np.asarray(new)).max())
    if end > capacity:
        raise UserError(
            f"cache: {end} tokens do not fit a cache of {capacity}; ask for a longer cache or generate fewer tokens"
        )


@struct.dataclass
class Replayed:
    """The token sequence that a recurrent layer runs in one call, and where its parts lie. n = draft + t."""

    inputs: Any  # pytree of [b, n, ...]: accepted old tokens, then the new ones, then garbage
    valid: Array  # bool [b, n]
    commit: Array  # int32 [b]: the state to keep is the one after this many tokens
    output: Array  # int32 [b, t]: index of each new token among the n


def replay(pending: Any, inputs: Any, accepted: Array, new: Array, tentative: Array) -> Replayed:
    """Put the accepted pending tokens before the new ones.

    A recurrent state cannot shrink, so it stays at the commit point and the *inputs* of the tentative tokens wait in `pending`
    (leaves `[b, draft, ...]`). The next call runs the accepted ones again, then its own tokens, in one pass.
    """
    t = jax.tree.leaves(inputs)[0].shape[1]
    draft = jax.tree.leaves(pending)[0].shape[1]
    j = jnp.arange(draft + t, dtype=jnp.int32)[None]
    a = jnp.minimum(accepted, draft)[:, None]
    source = jnp.where(j < a, j, draft + jnp.clip(j - a, 0, t - 1))

    def join(old: Array, fresh: Array) -> Array:
        both = jnp.concatenate([old, fresh.astype(old.dtype)], axis=1)
        return jnp.take_along_axis(both, source.reshape(source.shape + (1,) * (both.ndim - 2)), axis=1)

    valid = j < a + new[:, None]
    output = jnp.minimum(a + jnp.arange(t, dtype=jnp.int32)[None], draft + t - 1)
    return Replayed(jax.tree.map(join, pending, inputs), valid, a[:, 0] + new - tentative, output)


def keep_pending(run: Replayed, draft: int) -> Any:
    """The inputs of the tokens after the commit point: the next call's `pending`, leaves `[b, draft, ...]`."""
    n = run.valid.shape[1]
    index = jnp.minimum(run.commit[:, None] + jnp.arange(draft, dtype=jnp.int32)[None], n - 1)
    return jax.tree.map(
        lambda x: jnp.take_along_axis(x, index.reshape(index.shape + (1,) * (x.ndim - 2)), axis=1), run.inputs
    )


def cache_bytes(cache: Any) -> int:
    """Bytes that a cache really holds (arrays or their shapes)."""
    return sum(leaf.size * jnp.dtype(leaf.dtype).itemsize for leaf in jax.tree.leaves(cache))
