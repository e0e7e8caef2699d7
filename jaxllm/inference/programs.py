"""The compiled calls of one model: prefill, decode, the whole sequence again, and the draw. Shapes come from buckets.

Everything is compiled ahead of time, so compile time is known apart from run time and nothing is traced while tokens
are being timed. `Programs.traces` counts every trace: after a warm-up it must not move.
"""

import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax import Array
from jax.sharding import NamedSharding, PartitionSpec

from jaxllm.inference.sampling import Sampling, sample
from jaxllm.layers.base import Context
from jaxllm.model import LanguageModel

SMALLEST = 16  # shorter sequences share one compiled call: their padding costs less than another compilation


def bucket(size: int, limit: int | None = None, smallest: int = SMALLEST) -> int:
    """The padded size for `size`: the next power of two, at least `smallest`, and no more than `limit` allows."""
    padded = max(smallest, 1 << max(size - 1, 0).bit_length())
    return padded if limit is None else max(size, min(padded, limit))


@struct.dataclass
class Progress:
    """Where each row of a batch stands, int32 [b]; stays on the device from token to token.

    tokens: the last drawn id, not in the cache yet. lengths: tokens that have been through the model.
    remaining: draws left, 0 = finished.
    """

    tokens: Any
    lengths: Any
    remaining: Any


class Programs:
    """Compiled calls by name and shapes. Nothing else is kept: weights and caches are arguments and results.

    The draw is a call of its own: it takes as long to compile as a small model, and serves all the others.

    model: unrolled (its parameters unstacked and prepared). vocab_size: ids at or above it are never drawn.
    """

    def __init__(self, model: LanguageModel, vocab_size: int):
        self.model, self.vocab_size = model, vocab_size
        self.traces = 0
        self.compile_s = 0.0
        self._compiled: dict[Any, Callable[..., Any]] = {}

    # --- the functions, as they are traced ------------------------------------------------------------------------

    def _apply(self, weights: Any, method: str, *args: Any) -> Any:
        return self.model.apply({"params": weights}, *args, method=method)

    def _init(self, rows: int, capacity: int) -> tuple[Any, Array]:
        """An empty cache of `capacity` tokens a row, and logits [b v] for `_prefill` to fill in."""
        self.traces += 1
        logits = jnp.zeros((rows, self.model.padded_vocab), self.model.logits_dtype)
        return self.model.init_cache(rows, capacity), logits

    def _prefill(
        self, weights: Any, cache: Any, logits: Array, tokens: Array, lengths: Array, new: Array
    ) -> tuple[Any, Array]:
        """tokens [b t], `new` of them valid, after `lengths` cached ones. Rows with new tokens get new logits [b v]."""
        self.traces += 1
        ctx = Context.step(tokens, lengths, new)
        cache, out = self._apply(weights, "backbone", ctx, cache)
        return cache, jnp.where((new > 0)[:, None], self._head(weights, out.hidden, new), logits)

    def _decode(self, weights: Any, cache: Any, progress: Progress) -> tuple[Any, Array, Progress]:
        """One token a row. A finished row has nothing new: it writes nothing and its logits mean nothing."""
        self.traces += 1
        lengths = jnp.asarray(progress.lengths)
        new = (jnp.asarray(progress.remaining) > 0).astype(jnp.int32)
        ctx = Context.step(jnp.asarray(progress.tokens)[:, None], lengths, new)
        cache, out = self._apply(weights, "backbone", ctx, cache)
        return cache, self._head(weights, out.hidden, new), Progress(progress.tokens, lengths + new, progress.remaining)

    def _whole(self, weights: Any, tokens: Array, lengths: Array) -> Array:
        """tokens [b t] from the start, `lengths` of them valid -> logits [b v] after each row. No cache."""
        self.traces += 1
        valid = jnp.arange(tokens.shape[1])[None, :] < lengths[:, None]
        ctx = Context.whole(tokens, segments=valid)
        _, out = self._apply(weights, "backbone", ctx)
        return self._head(weights, out.hidden, lengths)

    def _head(self, weights: Any, hidden: Array, new: Array) -> Array:
        """Logits [b v] after the last of `new` valid places of hidden [b t d]: no other place needs the head.

        The barrier keeps XLA from pulling the choice of that place, and the norm before it, into the product with the head: on CPU
        the largest matrix of all would then be read by a naive loop that makes the norm again for every logit.
        """
        if hidden.shape[1] > 1:
            hidden = jnp.take_along_axis(hidden, jnp.maximum(new - 1, 0)[:, None, None], axis=1)
        return self._apply(weights, "head", jax.lax.optimization_barrier(hidden))[:, 0]

    def _draw(self, logits: Array, progress: Progress, rows: Sampling, stop: Array) -> tuple[Progress, Array, Array]:
        """Draw the token at position `lengths` of each row; ids in `stop` finish it."""
        self.traces += 1
        remaining = jnp.asarray(progress.remaining)
        ids, logprobs = sample(logits, rows, jnp.asarray(progress.lengths), self.vocab_size)
        stopped = (ids[:, None] == stop[None, :]).any(axis=1)
        remaining = jnp.where(stopped, 0, jnp.maximum(remaining - 1, 0))
        return Progress(ids, progress.lengths, remaining), ids, logprobs

    # --- compiled -------------------------------------------------------------------------------------------------

    def init(self, weights: Any, rows: int, capacity: int) -> Callable[..., Any]:
        """`_init`, on the devices of the weights; takes no arguments any more."""
        return self._get(("init", rows, capacity), lambda: self._init(rows, capacity), weights, lambda: ())

    def prefill(self, weights: Any, rows: int, capacity: int, length: int) -> Callable[..., Any]:
        """`_prefill` for `rows` rows of `length` padded tokens. The cache is donated."""

        def shapes() -> tuple[Any, ...]:
            return weights, *self._empty(rows, capacity), _int32(rows, length), _int32(rows), _int32(rows)

        return self._get(("prefill", rows, capacity, length), self._prefill, weights, shapes, donate=1)

    def decode(self, weights: Any, rows: int, capacity: int) -> Callable[..., Any]:
        """`_decode` for `rows` rows. The cache is donated."""

        def shapes() -> tuple[Any, ...]:
            return weights, self._empty(rows, capacity)[0], _progress(rows)

        return self._get(("decode", rows, capacity), self._decode, weights, shapes, donate=1)

    def whole(self, weights: Any, rows: int, length: int) -> Callable[..., Any]:
        """`_whole` for `rows` rows of `length` padded tokens."""

        def shapes() -> tuple[Any, ...]:
            return weights, _int32(rows, length), _int32(rows)

        return self._get(("whole", rows, length), self._whole, weights, shapes)

    def draw(self, weights: Any, rows: int, stops: int) -> Callable[..., Any]:
        """`_draw` for `rows` rows and `stops` stop ids."""

        def shapes() -> tuple[Any, ...]:
            number, seed = jax.ShapeDtypeStruct((rows,), jnp.float32), jax.ShapeDtypeStruct((rows, 2), jnp.uint32)
            sampling = Sampling(number, _int32(rows), number, number, seed)
            return self._empty(rows, 1)[1], _progress(rows), sampling, _int32(stops)

        return self._get(("draw", rows, stops), self._draw, weights, shapes)

    def _empty(self, rows: int, capacity: int) -> tuple[Any, Any]:
        """Shapes of what `_init` makes."""
        cache = jax.eval_shape(lambda: self.model.init_cache(rows, capacity))
        return cache, jax.ShapeDtypeStruct((rows, self.model.padded_vocab), jnp.dtype(self.model.logits_dtype))

    def _get(
        self,
        key: tuple[Any, ...],
        function: Callable[..., Any],
        weights: Any,
        shapes: Callable[[], tuple[Any, ...]],
        donate: int | None = None,
    ) -> Callable[..., Any]:
        """The executable for this key and for weights of this structure; made on the first request.

        shapes: () -> the arguments or their shapes; all but the weights live whole on each device of the weights.
        """
        leaves, tree = jax.tree.flatten(weights)
        full = (*key, tree, tuple((leaf.shape, leaf.dtype, leaf.sharding) for leaf in leaves))
        if full not in self._compiled:
            place = placement(weights)
            start = time.perf_counter()
            abstract = [_abstract(arg, None if arg is weights else place) for arg in shapes()]
            jitted = jax.jit(function, donate_argnums=() if donate is None else donate, out_shardings=place)
            self._compiled[full] = jitted.lower(*abstract).compile()
            self.compile_s += time.perf_counter() - start
        return self._compiled[full]


def placement(weights: Any) -> jax.sharding.Sharding:
    """Where everything but the weights lives: whole on each of their devices."""
    sharding = jax.tree.leaves(weights)[0].sharding
    return NamedSharding(sharding.mesh, PartitionSpec()) if isinstance(sharding, NamedSharding) else sharding


def _abstract(tree: Any, place: jax.sharding.Sharding | None) -> Any:
    """Shapes of a tree, placed at `place` or, for None, where its arrays are."""

    def one(leaf: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding if place is None else place)

    return jax.tree.map(one, tree)


def _int32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def _progress(rows: int) -> Progress:
    row = _int32(rows)
    return Progress(row, row, row)
