"""Paged caches on the device: one pool of pages a layer, seen by each row through its table of page numbers.

Any cache kind has a paged form, made from the kind itself by its shapes. A leaf of `init_cache(batch, length)` with an axis that grows
with the length (keys, values, latents, index keys, compressed entries: token p, or the m tokens `p .. p + m - 1`, at index p // m)
becomes a pool `init_cache(pages, page_size)`: a page is a row, whatever the layer. A leaf without one (recurrent states, rings, pending
buffers) becomes a pool of states with one slot a row.

    view    leaf[b, .., n size / m, ..]: the row's pages side by side: an ordinary cache, which an ordinary mixer reads and writes
    store   the places of the call's tokens go back into their pages; states go back into their slots

So paging is written once and a mixer need know nothing of it. One that says it `reads_pages` gets the pools instead of a view: it adds
its tokens with `append` and attends where they lie (`jaxllm.ops.paged_attention`), so nothing is copied. Page 0 and slot 0 are dump
space: padding points there.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct
from jax import Array

from jaxllm.cache import RingCache
from jaxllm.errors import UserError
from jaxllm.ops.paged_attention import by_head, read_pages

if TYPE_CHECKING:
    from jaxllm.layers.base import Context, Rows

PAGES = "pages"  # the one table of a row, in `Rows.tables`


class Pages(NamedTuple):
    """Sizes of the pools: `total` pages of `size` tokens, page 0 among them. kernel: what reads them where they lie."""

    total: int
    size: int
    kernel: str = "auto"


class Leaf(NamedTuple):
    """How one leaf is pooled. axis: the one that counts tokens, `tokens` of them a place; None: a state, pooled by slot."""

    axis: int | None
    tokens: int


@struct.dataclass
class Paged:
    """One layer's pools: `pool` has the structure of the layer's own cache, `leaves` says how each of its leaves is pooled."""

    pool: Any
    leaves: tuple[Leaf, ...] = struct.field(pytree_node=False)
    kernel: str = struct.field(pytree_node=False, default="auto")

    def view(self, ctx: Context) -> Any:
        """The rows' caches, as the layer itself would make them."""
        rows = ctx.rows
        assert rows is not None
        table = rows.tables[PAGES]
        return self._each(
            lambda leaf, x: (
                jnp.take(x, rows.slots, axis=0, mode="clip") if leaf.axis is None else read_pages(x, table, leaf.axis)
            ),
            self.pool,
        )

    def store(self, cache: Any, ctx: Context) -> Paged:
        """The pools with what a call has written into `cache`, in place when they are donated."""
        rows = ctx.rows
        assert rows is not None
        t = ctx.tokens.shape[1]

        def put(leaf: Leaf, x: Array, new: Array) -> Array:
            if leaf.axis is None:
                return x.at[rows.slots].set(new.astype(x.dtype))
            return _write(x, new, leaf, rows, t)

        return dataclasses.replace(self, pool=self._each(put, self.pool, cache))

    def append(self, fresh: Any, ctx: Context) -> Paged:
        """The pools with the call's tokens, in place when they are donated; for layers all of whose leaves hold a token at a place.

        fresh: in the structure of the pool, leaves `[b, g.., t, ..]`.
        """
        rows = ctx.rows
        assert rows is not None and all(leaf.axis is not None and leaf.tokens == 1 for leaf in self.leaves)

        def put(leaf: Leaf, x: Array, new: Array) -> Array:
            assert leaf.axis is not None
            return _put(x, new, leaf.axis, rows.tables[PAGES], ctx.positions, ctx.segments > 0)

        return dataclasses.replace(self, pool=self._each(put, self.pool, fresh))

    def copy(self, source: Array, target: Array, pages: bool = True) -> Paged:
        """Pages, or with pages=False states, `source [n]` copied over `target [n]`; 0 to 0 is no copy."""

        def one(leaf: Leaf, x: Array) -> Array:
            return x.at[target].set(x[source]) if (leaf.axis is not None) == pages else x

        return dataclasses.replace(self, pool=self._each(one, self.pool))

    @property
    def shares(self) -> bool:
        """Whether all that the layer remembers lies in pages, so that rows with one beginning can share it."""
        return all(leaf.axis is not None for leaf in self.leaves)

    def _each(self, function: Callable[..., Any], *trees: Any) -> Any:
        """`function(leaf, *arrays)` over all leaves, in the structure of the pool."""
        parts = [jax.tree.leaves(tree) for tree in trees]
        done = [function(leaf, *arrays) for leaf, *arrays in zip(self.leaves, *parts, strict=True)]
        return jax.tree.unflatten(jax.tree.structure(trees[0]), done)


def paged_of(make: Callable[[int, int], Any], slots: int, length: int, pages: Pages) -> Paged:
    """Pools for a layer whose own cache is `make(batch, length)`; `length`: tokens of the longest row.

    Raises:
        UserError: a layer that keeps one entry for m tokens, and pages that m does not divide.
    """
    leaves = leaves_of(make, max(length // (2 * pages.size), 1) * 2 * pages.size)
    for leaf in leaves:
        if pages.size % leaf.tokens:
            raise UserError(
                f"server.page_size: {pages.size} is not a multiple of {leaf.tokens}, the tokens that a layer compresses into one entry"
            )
    states, pool = make(slots, length), make(pages.total, pages.size)
    mixed = [
        state if leaf.axis is None else page
        for leaf, state, page in zip(leaves, jax.tree.leaves(states), jax.tree.leaves(pool), strict=True)
    ]
    return Paged(jax.tree.unflatten(jax.tree.structure(pool), mixed), leaves, pages.kernel)


def leaves_of(make: Callable[[int, int], Any], length: int) -> tuple[Leaf, ...]:
    """How the leaves of a layer's cache are pooled, read from the shapes at `length` tokens and fewer."""

    def shapes(n: int) -> list[tuple[int, ...]]:
        return [leaf.shape for leaf in jax.tree.leaves(jax.eval_shape(lambda: make(1, n)))]

    long, short = shapes(length), shapes(length // 2)
    whole = jax.eval_shape(lambda: make(1, length))
    rings = [_in_ring(whole, path) for path, _ in jax.tree_util.tree_leaves_with_path(whole)]
    out = []
    for i, (a, b, ring) in enumerate(zip(long, short, rings, strict=True)):
        axis = next((j for j, (x, y) in enumerate(zip(a, b, strict=True)) if y < x and 2 * y <= x <= 2 * y + 1), None)
        out.append(Leaf(None, 1) if ring or axis is None else Leaf(axis, _tokens(shapes, i, axis, length)))
    return tuple(out)


def _tokens(shapes: Callable[[int], list[tuple[int, ...]]], leaf: int, axis: int, length: int) -> int:
    """Tokens that one place stands for: half of the fewest for which there are two."""
    low, high = 1, length  # places(low) < 2 <= places(high)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if shapes(middle)[leaf][axis] >= 2 else (middle, high)
    return high // 2


def _in_ring(tree: Any, path: Any) -> bool:
    """Whether a leaf is part of a ring, which keeps positions of its own and is never cut into pages."""
    node = tree
    for key in path:
        if isinstance(node, RingCache):
            return True
        node = getattr(node, key.name) if hasattr(key, "name") else node[getattr(key, "key", getattr(key, "idx", None))]
    return False


def _write(x: Array, new: Array, leaf: Leaf, rows: Rows, t: int) -> Array:
    """The pool with the places of a call's t tokens, read from the rows' caches `new [b, g.., n m, ..]`.

    Of places that stand for m tokens, those whose last token this call brought.
    """
    assert leaf.axis is not None
    m, table = leaf.tokens, rows.tables[PAGES]
    count = t if m == 1 else (t + m - 2) // m + 1
    place = rows.lengths[:, None] // m + jnp.arange(count, dtype=jnp.int32)  # [b c]
    done = (place + 1) * m <= (rows.lengths + rows.new)[:, None]
    mine, heads = by_head(new, leaf.axis)  # [b g, n m, ..]
    index = jnp.repeat(jnp.minimum(place, mine.shape[1] - 1), heads, axis=0)
    fresh = jax.vmap(lambda rows, at: jnp.take(rows, at, axis=0, mode="clip"))(mine, index)  # [b g, c, ..]
    return _put(x, fresh, leaf.axis, table, place, done)


def _put(x: Array, fresh: Array, axis: int, table: Array, place: Array, valid: Array) -> Array:
    """A pool with `fresh`, `[b, g.., c, ..]` or with b and g as one axis, at the rows' places `place [b c]` where `valid [b c]`.

    The scatter carries one extra, dropped row: see `jaxllm.cache.write`.
    """
    flat, heads = by_head(x, axis)
    size = x.shape[axis]  # places of a page
    b, count = place.shape
    page = jnp.take_along_axis(table, jnp.minimum(place // size, table.shape[1] - 1), axis=1)
    lane = (page[:, None] * heads + jnp.arange(heads, dtype=jnp.int32)[None, :, None]).reshape(-1)
    offset = jnp.repeat(jnp.where(valid, place % size, size), heads, axis=0).reshape(-1)
    fresh = fresh.reshape(b * heads * count, *x.shape[axis + 1 :]).astype(x.dtype)
    lane = jnp.concatenate([lane, jnp.zeros(1, lane.dtype)])
    offset = jnp.concatenate([offset, jnp.full(1, size, offset.dtype)])
    fresh = jnp.concatenate([fresh, jnp.zeros_like(fresh[:1])])
    return flat.at[lane, offset].set(fresh, mode="drop").reshape(x.shape)
