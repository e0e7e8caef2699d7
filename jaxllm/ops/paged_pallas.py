"""Decoding on pages by Pallas: a program reads one row's pages of one kv head where they lie, and nothing is gathered first.

    for each page of the row:  s = scale q K^T;  m' = max(m, max s);  l' = e^(m - m') l + sum e^(s - m');  o' = e^(m - m') o + e^(s - m') V

Two kernels around that one step (online softmax, arXiv 1805.02867), because the machines fetch pages differently:

- TPU: the grid runs over pages too, and the table is given ahead (scalar prefetch), so that the next page is on its way while one is
  met. Behind a row's last page the grid names that page again, which is not fetched twice.
- GPU: a loop over some pages at a time. A row's pages are split over several programs, as few rows would leave most of a GPU idle.

Each program gives its unnormalised output, maximum and sum; `_joined` makes one of the splits (FlashDecoding) and a head's sink.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from jaxllm.ops import triton
from jaxllm.ops.attention import LOWEST
from jaxllm.ops.mask import Mask

GPU_PAGES, GPU_SPLITS = 4, 8  # pages of a turn of the loop; programs of a row and head at most
_MASKED = 10 * LOWEST  # a masked score: far below any maximum


def lacks(q: Array, k: Array, v: Array, mask: Mask, platform: str, *, asked: bool) -> str | None:
    """Why the kernel cannot do `q [b t h k]` on pools `k`, `v` on this platform, or None. `asked`: interpreted is better than nothing."""
    on_gpu = platform in ("gpu", "cuda", "rocm")
    if not on_gpu and platform != "tpu" and not asked:
        return f"it runs on GPUs and TPUs, not on {platform}"
    if on_gpu and not triton.is_there():
        return f"this JAX {jax.__version__} has no {triton.MODULE}"
    if mask != Mask():
        return "it knows causal masks only"
    mesh = jax.sharding.get_abstract_mesh()
    if not mesh.empty and mesh.size > 1:
        return f"it runs on one device, not on {mesh.size}"
    sizes = {"page_size": k.shape[-2], "the key's width": k.shape[-1], "the value's width": v.shape[-1]}
    for name, n in sizes.items() if on_gpu else ():
        if n < 16 or n & (n - 1):
            return f"a GPU wants powers of two from 16 on, and {name} is {n}"
    return None


def paged_decode(
    q: Array,
    k: Array,
    v: Array,
    table: Array,
    positions: Array,
    valid: Array,
    *,
    scale: float,
    softcap: float | None = None,
    sinks: Array | None = None,
    platform: str | None = None,
    interpret: bool | None = None,
) -> Array:
    """`q [b t h k]` at consecutive `positions [b t]`, of which the first `valid` ones count, on pools `[p (g) m .]` -> `[b t h v]`.

    platform: whose kernel; null = this machine's. interpret: null = wherever it is not this machine's.
    """
    here = jax.default_backend()
    if platform is None:
        platform = here if here in ("gpu", "tpu") else "tpu"
    k, v = (x[:, None] if x.ndim == 3 else x for x in (k, v))
    b, t, h, _ = q.shape
    g = k.shape[1]
    r = h // g
    # Rows of a program: token by token, then head by head, padded to what both compilers take.
    rows = q.reshape(b, t, g, r, -1).transpose(0, 2, 1, 3, 4).reshape(b, g, t * r, -1)
    rows = jnp.pad(rows, ((0, 0), (0, 0), (0, -(t * r) % 16), (0, 0)))
    new = jnp.sum(valid, axis=1, dtype=jnp.int32)
    made = _gpu if platform in ("gpu", "cuda", "rocm") else _tpu
    parts = made(
        rows,
        k,
        v,
        table.astype(jnp.int32),
        positions[:, 0].astype(jnp.int32),
        new,
        step=functools.partial(_step, tokens=t, heads=r, scale=scale, softcap=softcap),
        interpret=platform != here if interpret is None else interpret,
    )
    start = None if sinks is None else jnp.tile(sinks.astype(jnp.float32).reshape(g, r), (1, t))[None, :, :, None]
    out, top, total = (x[:, :, :, : t * r] for x in parts)
    out = _joined(out, top, total, start).reshape(b, g, t, r, -1)
    out = out.transpose(0, 2, 1, 3, 4).reshape(b, t, h, -1)
    return jnp.where(valid[:, :, None, None], out, 0).astype(q.dtype)


def _step(
    state: tuple[Array, Array, Array],
    q: Array,
    k: Array,
    v: Array,
    at: Any,
    start: Any,
    new: Any,
    *,
    tokens: int,
    heads: int,
    scale: float,
    softcap: float | None,
) -> tuple[Array, Array, Array]:
    """Meet keys `k [s .]`, `v [s .]` at positions `at ..` by query rows `q [n .]`, of which `heads` belong to one token each, from
    position `start` on, the first `new` tokens of them valid."""
    out, top, total = state
    n, s = q.shape[0], k.shape[0]
    precision = lax.Precision.HIGHEST if q.dtype == jnp.float32 else None
    scores = lax.dot_general(q, k, (((1,), (1,)), ((), ())), precision=precision, preferred_element_type=jnp.float32)
    scores = scores * scale
    if softcap is not None:
        scores = softcap * jnp.tanh(scores / softcap)
    row = lax.broadcasted_iota(jnp.int32, (n, s), 0)
    token = jnp.zeros((n, s), jnp.int32)
    for i in range(1, tokens):
        token += (row >= i * heads).astype(jnp.int32)
    key = at + lax.broadcasted_iota(jnp.int32, (n, s), 1)
    seen = (key <= start + token) & (token < new)
    scores = jnp.where(seen, scores, _MASKED)
    higher = jnp.maximum(top, jnp.max(scores, axis=1, keepdims=True))
    weights, keep = jnp.exp(scores - higher), jnp.exp(top - higher)
    more = lax.dot_general(
        weights.astype(v.dtype), v, (((1,), (0,)), ((), ())), precision=precision, preferred_element_type=jnp.float32
    )
    return out * keep + more, higher, total * keep + jnp.sum(weights, axis=1, keepdims=True)


def _empty(n: int, width: int) -> tuple[Array, Array, Array]:
    return jnp.zeros((n, width), jnp.float32), jnp.full((n, 1), LOWEST), jnp.zeros((n, 1), jnp.float32)


def _joined(out: Array, top: Array, total: Array, sinks: Array | None) -> Array:
    """`[b g n v]` from the parts `out [b g z n v]`, `top`, `total [b g z n 1]` of z splits; `sinks [1 g n 1]` count as a key of value 0."""
    out, top, total = (jnp.moveaxis(x, 2, 0) for x in (out, top, total))
    highest = jnp.max(top, axis=0)
    highest = highest if sinks is None else jnp.maximum(highest, sinks)
    share = jnp.exp(top - highest)
    mass = jnp.sum(total * share, axis=0)
    mass = mass if sinks is None else mass + jnp.exp(sinks - highest)
    return jnp.sum(out * share, axis=0) / jnp.where(mass > 0, mass, 1.0)


# --- TPU ---------------------------------------------------------------------------------------------------------------------------


def _tpu_kernel(
    table_ref: Any,
    start_ref: Any,
    new_ref: Any,
    q_ref: Any,
    k_ref: Any,
    v_ref: Any,
    out_ref: Any,
    top_ref: Any,
    total_ref: Any,
    *,
    step: Any,
) -> None:
    """One page of one row and head; the outputs stay on the chip from page to page."""
    del table_ref  # the index maps have read it
    i, page = pl.program_id(0), pl.program_id(2)
    size, refs = k_ref.shape[-2], (out_ref, top_ref, total_ref)

    @pl.when(page == 0)
    def _() -> None:
        for ref, value in zip(refs, _empty(q_ref.shape[-2], v_ref.shape[-1]), strict=True):
            ref[...] = value

    @pl.when(page * size < start_ref[i] + new_ref[i])
    def _() -> None:
        state = tuple(ref[...] for ref in refs)
        state = step(
            state, q_ref[...], k_ref[...].astype(q_ref.dtype), v_ref[...].astype(q_ref.dtype), page * size, start_ref[i], new_ref[i]
        )  # fmt: skip
        for ref, value in zip(refs, state, strict=True):
            ref[...] = value


def _tpu(
    q: Array, k: Array, v: Array, table: Array, start: Array, new: Array, *, step: Any, interpret: bool
) -> list[Array]:
    from jax.experimental.pallas import tpu as pltpu

    b, g, n, _ = q.shape
    size, width = k.shape[-2], v.shape[-1]

    def row(i: Any, j: Any, page: Any, *scalars: Any) -> tuple[Any, ...]:
        return i, j, 0, 0

    def page_of(i: Any, j: Any, page: Any, table: Any, start: Any, new: Any) -> tuple[Any, ...]:
        last = lax.div(jnp.maximum(start[i] + new[i] - 1, 0), size)  # `//` asks for signs, and so for the kind of TPU
        return table[i, jnp.minimum(page, last)], j, 0, 0

    shapes = [(n, width), (n, 1), (n, 1)]
    parts = pl.pallas_call(
        functools.partial(_tpu_kernel, step=step),
        out_shape=[jax.ShapeDtypeStruct((b, g, *shape), jnp.float32) for shape in shapes],
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(b, g, table.shape[1]),
            in_specs=[
                pl.BlockSpec((None, None, n, q.shape[-1]), row),
                pl.BlockSpec((None, None, size, k.shape[-1]), page_of),
                pl.BlockSpec((None, None, size, width), page_of),
            ],
            out_specs=[pl.BlockSpec((None, None, *shape), row) for shape in shapes],
        ),
        interpret=interpret,
    )(table, start, new, q, k, v)
    return [x[:, :, None] for x in parts]


# --- GPU ---------------------------------------------------------------------------------------------------------------------------


def _gpu_kernel(
    table_ref: Any,
    start_ref: Any,
    new_ref: Any,
    q_ref: Any,
    k_ref: Any,
    v_ref: Any,
    out_ref: Any,
    top_ref: Any,
    total_ref: Any,
    *,
    step: Any,
    heads: int,
) -> None:
    """Some of the pages of one row and head: `table_ref [pages]`, pools `[p g, m, .]`."""
    head, split = pl.program_id(1), pl.program_id(2)
    pages, size = table_ref.shape[0], k_ref.shape[-2]
    first = split * pages * size
    start, new, q = start_ref[0], new_ref[0], q_ref[...]

    def meet(turn: Any, state: Any) -> Any:
        lanes = table_ref[pl.ds(turn * GPU_PAGES, GPU_PAGES)] * heads + head
        keys = k_ref[lanes].reshape(GPU_PAGES * size, -1).astype(q.dtype)
        values = v_ref[lanes].reshape(GPU_PAGES * size, -1).astype(q.dtype)
        return step(state, q, keys, values, first + turn * GPU_PAGES * size, start, new)

    left = jnp.clip(start + new - first, 0, pages * size)
    turns = lax.div(left + GPU_PAGES * size - 1, GPU_PAGES * size)
    state = lax.fori_loop(0, turns, meet, _empty(q.shape[0], v_ref.shape[-1]))
    for ref, value in zip((out_ref, top_ref, total_ref), state, strict=True):
        ref[...] = value


def _gpu(
    q: Array, k: Array, v: Array, table: Array, start: Array, new: Array, *, step: Any, interpret: bool
) -> list[Array]:
    b, g, n, _ = q.shape
    width = v.shape[-1]
    splits = max(1, min(GPU_SPLITS, table.shape[1] // GPU_PAGES))
    table = jnp.pad(table, ((0, 0), (0, -table.shape[1] % (splits * GPU_PAGES))))  # behind every query, so never met
    pools = [x.reshape(-1, *x.shape[2:]) for x in (k, v)]

    def whole(x: Array) -> pl.BlockSpec:
        return pl.BlockSpec(x.shape, lambda i, j, z: (0,) * x.ndim)

    shapes = [(n, width), (n, 1), (n, 1)]
    parts: list[Array] = pl.pallas_call(
        functools.partial(_gpu_kernel, step=step, heads=g),
        out_shape=[jax.ShapeDtypeStruct((b, g, splits, *shape), jnp.float32) for shape in shapes],
        grid=(b, g, splits),
        in_specs=[
            pl.BlockSpec((None, table.shape[1] // splits), lambda i, j, z: (i, z)),
            pl.BlockSpec((1,), lambda i, j, z: (i,)),
            pl.BlockSpec((1,), lambda i, j, z: (i,)),
            pl.BlockSpec((None, None, n, q.shape[-1]), lambda i, j, z: (i, j, 0, 0)),
            *map(whole, pools),
        ],
        out_specs=[pl.BlockSpec((None, None, None, *shape), lambda i, j, z: (i, j, z, 0, 0)) for shape in shapes],
        compiler_params=triton.compiler(num_warps=4),
        interpret=interpret,
    )(table, start, new, q, *pools)
    return parts
