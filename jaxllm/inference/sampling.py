"""Drawing one token id per row from logits: pure functions, every parameter an array over rows.

The order is fixed, and is the one most libraries use:

1. ids past `vocab_size` (padding of the head for sharding) are cut off: they cannot be drawn and carry no mass;
2. temperature: p = softmax(logits / T). T = 0, or anything below `GREEDY_BELOW`, is exactly argmax, lowest id on ties;
3. top-k: the k most likely ids (0 = off), ties broken by the lower id, so exactly k stay;
4. top-p: of what top-k left, renormalised, the shortest prefix in descending order whose mass reaches p: an id stays
   if the mass *before* it is below p, so the most likely id always stays and p = 1 changes nothing, bit for bit;
5. min-p: ids with p_i >= min_p * max p stay (0 = off);
6. a draw by the Gumbel-max rule, with a key made from (seed of the row, absolute position of the token to be drawn).

Step 6 makes a row's draws independent of its batch mates, of how its prompt was cut into chunks, and of a restart. The
noise belongs to ids, not ranks, so switching a filter on for one row leaves every other row's draw as it was.

Log probabilities are those of the unmodified distribution, log softmax(logits) over the real vocabulary: they do
not depend on steps 2-5.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import Array
from jax.typing import ArrayLike

from jaxllm.errors import UserError

GREEDY_BELOW = 1e-6  # a gap of 2e-5 nats already decides a draw at this temperature: nothing random is left in f32


class SamplingParams(NamedTuple):
    """How one row is sampled, in plain numbers. `seed` is any integer; its low 64 bits count."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0

    def check(self) -> "SamplingParams":
        """Itself, or a UserError that names the key and the wrong value."""
        finite = np.isfinite(self.temperature)
        rules = (
            ("temperature", finite and self.temperature >= 0, "a finite number >= 0 (0 = greedy)"),
            ("top_k", self.top_k >= 0, "an integer >= 0 (0 = off)"),
            ("top_p", 0 < self.top_p <= 1, "in (0, 1] (1 = off)"),
            ("min_p", 0 <= self.min_p <= 1, "in [0, 1] (0 = off)"),
        )
        for name, good, allowed in rules:
            if not good:
                raise UserError(f"{name}={getattr(self, name)}: must be {allowed}")
        return self


GREEDY = SamplingParams(temperature=0.0)


@struct.dataclass
class Sampling:
    """Sampling parameters of a batch, one entry a row: fixed shapes, so changing a value never retraces.

    Attributes: temperature, top_p, min_p float32 [b]; top_k int32 [b]; seed uint32 [b 2], high word first.
    """

    temperature: Any
    top_k: Any
    top_p: Any
    min_p: Any
    seed: Any

    @classmethod
    def rows(cls, params: Sequence[SamplingParams]) -> "Sampling":
        """Stack one SamplingParams a row into numpy arrays, which a compiled call takes as they are."""
        limit = np.iinfo(np.int32).max
        seeds = [((p.seed >> 32) & 0xFFFFFFFF, p.seed & 0xFFFFFFFF) for p in params]
        return cls(
            temperature=np.array([p.temperature for p in params], np.float32),
            top_k=np.array([min(p.top_k, limit) for p in params], np.int32),
            top_p=np.array([p.top_p for p in params], np.float32),
            min_p=np.array([p.min_p for p in params], np.float32),
            seed=np.array(seeds, np.uint32).reshape(len(params), 2),
        )


def keep(probabilities: Array, top_k: Array, top_p: Array, min_p: Array) -> Array:
    """Which ids top-k, then top-p, then min-p leave: bool [b v] from probabilities [b v] that sum to 1 a row.

    The most likely id of a row always stays. One stable sort serves all three filters.
    """
    batch, vocab = probabilities.shape
    order = jnp.argsort(-probabilities, axis=-1, stable=True)
    ordered = jnp.take_along_axis(probabilities, order, axis=-1)
    rank = jnp.arange(vocab)[None, :]
    limited = (top_k > 0)[:, None]

    kept = ~limited | (rank < top_k[:, None])
    mass = jnp.where(kept, ordered, 0.0)
    # Without top-k the total is 1 by construction; its rounded sum would move ids that sit exactly on p.
    total = jnp.where(limited, mass.sum(axis=-1, keepdims=True), 1.0)
    before = jnp.pad(jnp.cumsum(mass, axis=-1)[:, :-1], ((0, 0), (1, 0)))
    kept &= (top_p >= 1.0)[:, None] | (before < top_p[:, None] * total)
    kept &= ordered >= min_p[:, None] * ordered[:, :1]
    kept |= rank == 0
    return jnp.zeros((batch, vocab), bool).at[jnp.arange(batch)[:, None], order].set(kept)


def filter_logits(logits: Array, rows: Sampling) -> Array:
    """logits [b v] -> float32 [b v]: shifted to a maximum of 0, divided by T, -inf at ids that the filters drop.

    Rows below `GREEDY_BELOW` are treated as T = 1 here; `sample` takes their argmax from the raw logits.
    """
    logits = logits.astype(jnp.float32)
    peak = jnp.max(logits, axis=-1, keepdims=True)
    # Subtracting first keeps 1/T from overflowing the largest entry; a row of only -inf must not become NaN.
    shifted = logits - jnp.where(jnp.isfinite(peak), peak, 0.0)
    temperature, top_k, top_p, min_p = map(jnp.asarray, (rows.temperature, rows.top_k, rows.top_p, rows.min_p))
    scaled = shifted / jnp.where(temperature < GREEDY_BELOW, 1.0, temperature)[:, None]

    def drop(scaled: Array) -> Array:
        weights = jnp.exp(scaled)
        probabilities = weights / jnp.maximum(weights.sum(axis=-1, keepdims=True), jnp.finfo(jnp.float32).tiny)
        return jnp.where(keep(probabilities, top_k, top_p, min_p), scaled, -jnp.inf)

    filtering = jnp.any((top_k > 0) | (top_p < 1.0) | (min_p > 0.0))
    return jax.lax.cond(filtering, drop, lambda x: x, scaled)  # the sort costs more than the rest of the draw


def row_keys(seed: ArrayLike, positions: Array) -> Array:
    """Keys [b] from seeds uint32 [b 2] and the absolute positions int32 [b] of the tokens to be drawn."""
    # Named because only threefry gives a row the same bits alone and under vmap.
    keys = jax.random.wrap_key_data(jnp.asarray(seed), impl="threefry2x32")
    return jax.vmap(jax.random.fold_in)(keys, positions)


def chosen_logprobs(logits: Array, ids: Array) -> Array:
    """log softmax(logits)[id] as float32 [b]; -inf where a row has no finite logit."""
    logits = logits.astype(jnp.float32)
    peak = jnp.max(logits, axis=-1)
    peak = jnp.where(jnp.isneginf(peak), 0.0, peak)
    total = jnp.sum(jnp.exp(logits - peak[:, None]), axis=-1)
    chosen = jnp.take_along_axis(logits, ids[:, None], axis=-1)[:, 0]
    return jnp.where(total == 0.0, -jnp.inf, chosen - peak - jnp.log(jnp.where(total == 0.0, 1.0, total)))


def sample(logits: Array, rows: Sampling, positions: Array, vocab_size: int) -> tuple[Array, Array]:
    """Draw one id a row.

    Args:
        logits: [b v], any float dtype, v >= vocab_size; -inf is allowed. A row of only -inf gives id 0, logprob -inf.
        rows: parameters of the b rows.
        positions: int32 [b], absolute position of the token to be drawn (the number of tokens before it).
        vocab_size: ids at or above it are padding.

    Returns:
        ids int32 [b]; logprobs float32 [b] of these ids under the unmodified logits.
    """
    logits = logits[:, :vocab_size].astype(jnp.float32)
    best = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    greedy = jnp.asarray(rows.temperature) < GREEDY_BELOW

    def draw(logits: Array) -> Array:
        keys = row_keys(rows.seed, positions)
        noise = jax.vmap(lambda key: jax.random.gumbel(key, (vocab_size,), jnp.float32))(keys)
        drawn = jnp.argmax(filter_logits(logits, rows) + noise, axis=-1).astype(jnp.int32)
        return jnp.where(greedy, best, drawn)

    ids = jax.lax.cond(jnp.all(greedy), lambda _: best, draw, logits)
    return ids, chosen_logprobs(logits, ids)
