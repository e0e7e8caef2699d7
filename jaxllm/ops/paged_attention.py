"""Attention of new tokens on keys and values that lie in pages (PagedAttention, Kwon et al. 2023, arXiv 2309.06180, section 4.1).

A pool `[p g m k]` holds p pages of m tokens; row i's token at position s lies in page `table[i, s // m]` at place `s % m`. Under one name
each:

| name | what it is | where |
| --- | --- | --- |
| naive | all pages of a row side by side, then one score matrix: the truth that the others are tested against | short rows |
| blocks | a few pages at a time by online softmax: what is gathered stays in the processor's cache | anywhere |
| pallas | a kernel that reads pages where they lie, for a few new tokens a row (`paged_pallas.py`) | GPUs, TPUs; else interpreted |

`auto` takes the kernel where it can do what is asked, else blocks.

Shapes: `q [b t h k]` at `positions [b t]`, pools `k [p g m k]` and `v [p g m v]`, without g where it is 1, `table [b n]`, `sinks [h]`;
output `[b t h v]`, 0 where not `valid [b t]`. A query sees the keys at positions up to its own that the mask lets through.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from jaxllm.errors import UserError
from jaxllm.ops.attention import LOWEST, attend_cache, normalised, per_group, per_head
from jaxllm.ops.blockwise import State, online_finish, online_start, online_step, query_blocks, tokens_of
from jaxllm.ops.mask import Mask
from jaxllm.ops.paged_pallas import lacks, paged_decode

KERNELS = ("auto", "naive", "blocks", "pallas")
# Keys, and queries, of a block. Measured on CPU, 8 rows of 1,024 tokens: 64 keys a block took 1.2 times as long, 1,024 2 to 4 times.
BLOCK = 256
FEW = 16  # new tokens a row up to which the kernel is meant, and scores of all keys are kept
MOST_SCORES = 2**24  # of them


def check_kernel(name: str) -> None:
    if name not in KERNELS:
        raise UserError(f"server.kernel: {name!r} is not one of {', '.join(KERNELS)}")


class PagedKV(NamedTuple):
    """Pools of one layer and the tables of a call's rows."""

    k: Array
    v: Array
    table: Array

    @property
    def size(self) -> int:
        """Tokens of a page."""
        return int(self.k.shape[-2])

    @property
    def heads(self) -> int:
        return 1 if self.k.ndim == 3 else int(self.k.shape[1])


def read_pages(x: Array, table: Array, axis: int) -> Array:
    """`[b, g.., n m, ..]` of a pool `[p, g.., m, ..]` whose axis `axis` counts the places of a page, and `table [b n]`.

    On CPU one head's page is gathered as one row: XLA then copies it at the speed of memory, 1.4 times as fast as by its own axes.
    The barrier keeps the reshape out of that loop, which would walk the page's own axes again: attention on pages of 16 took 1.2 times
    as long. Elsewhere memory is tiled, and another shape may be another place.
    """
    flat, heads = by_head(x, axis)
    b, n = table.shape
    index = table[:, None, :] * heads + jnp.arange(heads, dtype=jnp.int32)[None, :, None]
    shape = (b, *x.shape[1:axis], n * x.shape[axis], *x.shape[axis + 1 :])
    if jax.default_backend() != "cpu":
        return jnp.take(flat, index, axis=0, mode="clip").reshape(shape)
    rows = jnp.take(flat.reshape(flat.shape[0], -1), index.reshape(-1), axis=0, mode="clip")
    return lax.optimization_barrier(rows).reshape(shape)


def by_head(x: Array, axis: int) -> tuple[Array, int]:
    """`[p, g.., m, ..]` as `[p g, m, ..]`, and the product of the axes g: a page of one head is one run of memory."""
    heads = 1
    for n in x.shape[1:axis]:
        heads *= n
    return x.reshape(x.shape[0] * heads, *x.shape[axis:]), heads


def paged_attention(
    q: Array,
    pages: PagedKV,
    positions: Array,
    valid: Array,
    mask: Mask,
    *,
    scale: float,
    softcap: float | None = None,
    sinks: Array | None = None,
    kernel: str = "auto",
) -> Array:
    """By whichever kernel is asked for. Raises UserError for one that cannot do it."""
    check_kernel(kernel)
    name, why = kernel, None
    if kernel in ("auto", "pallas"):
        why = lacks(q, pages.k, pages.v, mask, jax.default_backend(), asked=kernel == "pallas")
        name = "blocks" if kernel == "auto" and why is not None else "pallas"
    if name == "pallas" and why is not None:
        raise UserError(f"server.kernel: pallas cannot do this layer: {why}; take auto or blocks")
    scores: dict[str, Any] = {"scale": scale, "softcap": softcap, "sinks": sinks}
    if name == "pallas" and q.shape[1] <= FEW:
        return paged_decode(q, pages.k, pages.v, pages.table, positions, valid, **scores)
    attend = paged_naive if name == "naive" else paged_blocks
    return attend(q, pages, positions, valid, mask, **scores)


def paged_naive(
    q: Array,
    pages: PagedKV,
    positions: Array,
    valid: Array,
    mask: Mask,
    *,
    scale: float,
    softcap: float | None = None,
    sinks: Array | None = None,
) -> Array:
    """The truth: all pages of all rows at once."""
    b, t, h, _ = q.shape
    keys, values = (read_pages(x, pages.table, x.ndim - 2).astype(q.dtype) for x in (pages.k, pages.v))
    held = jnp.arange(keys.shape[-2], dtype=jnp.int32)
    seen = mask.sees(positions[:, :, None], held) & valid[:, :, None]
    rows = q.reshape(b, t, pages.heads, h // pages.heads, -1).transpose(0, 2, 3, 1, 4)
    out = attend_cache(rows, keys, values, seen, scale=scale, softcap=softcap, sinks=sinks)
    return out.transpose(0, 3, 1, 2, 4).reshape(b, t, h, -1)


def paged_blocks(
    q: Array,
    pages: PagedKV,
    positions: Array,
    valid: Array,
    mask: Mask,
    *,
    scale: float,
    softcap: float | None = None,
    sinks: Array | None = None,
    block: int = BLOCK,
) -> Array:
    """About `block` keys at a time. Pages behind the last query of all rows are not read, however wide the table.

    A few queries first score all keys, then sum all values: two short loops, of which each only gathers and multiplies. Many queries
    (or a table so wide that their scores would fill memory) keep running sums instead.
    """
    b, t = positions.shape
    g, size = pages.heads, pages.size
    each = max(1, min(block // size, pages.table.shape[1]))  # pages of a block
    width = each * size
    table = jnp.pad(pages.table, ((0, 0), (0, -pages.table.shape[1] % each)))  # behind every query, so never seen
    if t <= FEW and b * t * q.shape[2] * table.shape[1] * size <= MOST_SCORES:
        return _two_passes(q, pages._replace(table=table), positions, valid, mask, each, scale, softcap, sinks)
    c = min(block, t)
    extra = -t % c
    groups = query_blocks(q, g, c, extra)

    def of(x: Array) -> Array:
        return jnp.pad(x, ((0, 0), (0, extra))).reshape(b, -1, c).transpose(1, 0, 2)

    start = per_group(sinks, g)

    def one(part: tuple[Array, Array, Array]) -> Array:
        query, at, live = part
        last = jnp.max(jnp.where(live, at, -1)) + 1

        def meet(i: Any, state: State) -> State:
            some = lax.dynamic_slice_in_dim(table, i * each, each, 1)
            keys, values = (read_pages(x, some, x.ndim - 2).astype(q.dtype) for x in (pages.k, pages.v))
            held = i * width + jnp.arange(width, dtype=jnp.int32)
            seen = mask.sees(at[:, :, None], held) & live[:, :, None]
            return online_step(state, query, keys, values, seen, scale, softcap)

        state = online_start((*query.shape[:-1], pages.v.shape[-1]), start)
        return online_finish(lax.fori_loop(0, (last + width - 1) // width, meet, state), q.dtype)[0]

    parts = groups, of(positions), of(valid)
    out = one(jax.tree.map(lambda x: x[0], parts))[None] if groups.shape[0] == 1 else lax.map(one, parts)
    return tokens_of(out, t)


def _two_passes(
    q: Array,
    pages: PagedKV,
    positions: Array,
    valid: Array,
    mask: Mask,
    each: int,
    scale: float,
    softcap: float | None,
    sinks: Array | None,
) -> Array:
    """By `each` pages, which divide the table."""
    b, t, h, _ = q.shape
    g, width, v = pages.heads, each * pages.size, pages.v.shape[-1]
    keys = pages.table.shape[1] * pages.size
    rows = q.reshape(b, t, g, h // g, -1).transpose(0, 2, 3, 1, 4)  # [b g r t k]
    flat = rows.reshape(b, g, -1, q.shape[-1])
    last = jnp.max(jnp.where(valid, positions, -1)) + 1
    count = (last + width - 1) // width

    def block(x: Array, i: Any) -> Array:
        some = lax.dynamic_slice_in_dim(pages.table, i * each, each, 1)
        return read_pages(x, some, x.ndim - 2).astype(q.dtype)

    def score(i: Any, scores: Array) -> Array:
        return lax.dynamic_update_slice_in_dim(
            scores, per_head("nk,sk->ns", flat, block(pages.k, i)), i * width, axis=3
        )

    scores = lax.fori_loop(0, count, score, jnp.zeros((b, g, flat.shape[2], keys), jnp.float32))
    scores = scores.reshape(*rows.shape[:4], keys) * scale
    if softcap is not None:
        scores = softcap * jnp.tanh(scores / softcap)
    seen = mask.sees(positions[:, :, None], jnp.arange(keys, dtype=jnp.int32)) & valid[:, :, None]
    scores = jnp.where(seen[:, None, None], scores, 10 * LOWEST)
    weights, total, _ = normalised(scores, per_group(sinks, g))
    weights = weights.reshape(b, g, -1, keys).astype(q.dtype)

    def add(i: Any, out: Array) -> Array:
        part = lax.dynamic_slice_in_dim(weights, i * width, width, axis=3)
        return out + per_head("ns,sv->nv", part, block(pages.v, i))

    out = lax.fori_loop(0, count, add, jnp.zeros((b, g, flat.shape[2], v), jnp.float32))
    out = out.reshape(*rows.shape[:4], v) / total
    return out.transpose(0, 3, 1, 2, 4).reshape(b, t, h, v).astype(q.dtype)
