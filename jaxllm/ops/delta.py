"""The gated delta rule of whole sequences and long chunks of a prompt by any of several kernels, under one name each.

| name | what it is | where |
| --- | --- | --- |
| recurrent | token by token (`jaxllm.ops.delta_rule`): the truth; the fastest forward of a small state on CPU | anywhere |
| naive | chunks, the decays between all pairs of tokens in memory | short sequences |
| chunk | chunks by matrix products (`jaxllm.ops.delta_chunk`), with a backward of its own and memory linear in the length | anywhere |
| pallas | the same, a chunk's matrices by a kernel (`jaxllm.ops.delta_pallas`) | GPUs and TPUs; interpreted, and slow, elsewhere |

`auto` is `chunk`, on CPU with a forward token by token where no derivative is asked for and the state stays in the processor's cache.
Where the mesh splits the length, every kernel runs on each device's tokens and the states are composed (`jaxllm.ops.delta_parallel`).
"""

import functools
from typing import Any

import jax
from jax import Array

from jaxllm.errors import UserError
from jaxllm.mesh import axes_in_force, shard_map_over
from jaxllm.ops.delta_chunk import chunked
from jaxllm.ops.delta_pairs import TILE
from jaxllm.ops.delta_parallel import across
from jaxllm.ops.delta_rule import chunk_naive, recurrent

KERNELS = ("auto", "recurrent", "naive", "chunk", "pallas")
SAFE_DECAY = -5.0  # the least log-decay of a token that a tile of sixteen may be factored with: see `delta_pairs.py`
SMALL_STATE = (
    2**19
)  # bytes; measured on CPU: states of up to this size go faster token by token than in chunks, forward alone


def check_delta_kernel(name: str) -> None:
    if name not in KERNELS:
        raise UserError(f"kernel: {name!r} is not one of {', '.join(KERNELS)}")


def delta_rule(
    q: Array,
    k: Array,
    v: Array,
    g: Array,
    beta: Array,
    first: Array | None = None,
    state: Array | None = None,
    *,
    kernel: str = "auto",
    chunk: int = 64,
    bounded: bool = False,
) -> tuple[Array, Array]:
    """Outputs `[b t h v]` in v's dtype and the last state, fp32 `[b h k v]`. Shapes as in `delta_rule.py`.

    chunk: tokens at once, a power of two. bounded: promises that no log-decay is below `SAFE_DECAY`.
    """
    rule = _rule(kernel, chunk, bounded, state_bytes(k, v))
    axes = axes_in_force("length")
    if not axes:
        return rule(q, k, v, g, beta, first, state)
    if len(axes) > 1:
        raise UserError(f"mesh.rules.length: {', '.join(axes)}: a recurrence goes over one mesh axis; give one")
    return _over_devices(rule, axes[0], (q, k, v, g, beta), first, state)


def _rule(kernel: str, chunk: int, bounded: bool, size: int) -> Any:
    if kernel == "recurrent":
        return recurrent
    if kernel == "naive":
        return functools.partial(chunk_naive, chunk=chunk)
    scan = kernel == "auto" and jax.default_backend() == "cpu" and size <= SMALL_STATE
    return functools.partial(chunked, chunk=chunk, bounded=bounded, scan=scan, pallas=kernel == "pallas")


def _over_devices(
    rule: Any, axis: str, parts: tuple[Array, ...], first: Array | None, state: Array | None
) -> tuple[Array, Array]:
    """Under a mesh that splits the length: each device its tokens, rows and heads."""
    row = ("batch", "length", "act_heads")
    token, whole = (*row, None), ("batch", "act_heads", None, None)
    split = tuple(token if x.ndim == 4 else row for x in parts)
    given = {"first": (first, ("batch", "length")), "state": (state, whole)}
    given = {name: pair for name, pair in given.items() if pair[0] is not None}  # `shard_map` takes no None

    def local(parts: tuple[Array, ...], given: dict[str, Array]) -> tuple[Array, Array]:
        return across(rule, axis, parts, given.get("first"), given.get("state"))

    # The state is the same along the axis because all gather the same maps, which JAX cannot see.
    axes = (split, {name: pair[1] for name, pair in given.items()})
    run = shard_map_over(local, axes, (token, whole), check_vma=False)
    return run(parts, {name: pair[0] for name, pair in given.items()})


def state_bytes(k: Array, v: Array) -> int:
    """Bytes of the state of all rows and heads."""
    return 4 * k.shape[0] * k.shape[2] * k.shape[3] * v.shape[3]


def chunk_flops(chunk: int, k: int, v: int, *, scalar: bool, bounded: bool) -> int:
    """Matmul FLOPs of the forward of one head and one chunk in the form of `delta_chunk.py`: about `10 C` MACs a token and width."""
    tile = min(TILE, chunk)
    halvings = range(tile.bit_length() - 1, chunk.bit_length() - 1)  # of pieces of two tiles and more
    inverse = chunk * tile**2 * 2 * max(tile.bit_length() - 2, 0) + sum(chunk * 4**n for n in halvings)
    if scalar:
        pairs = 2 * chunk**2 * (k + 1) + chunk**3
    else:
        smallest = tile if bounded else 1
        pairs = chunk * k * (2 * smallest + chunk - smallest)
    return 2 * (pairs + inverse + chunk**2 * (k + 2 * v) + 3 * chunk * k * v)
