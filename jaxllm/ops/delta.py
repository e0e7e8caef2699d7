"""The gated delta rule of whole sequences and long chunks by any of several kernels, under one name each.

| name | what it is |
| --- | --- |
| recurrent | token by token: the truth, and the fastest forward on CPU |
| naive | chunks, all decays between pairs of tokens in memory |
"""

from jax import Array

from jaxllm.errors import UserError
from jaxllm.ops.delta_rule import chunk_naive, recurrent

KERNELS = ("auto", "recurrent", "naive")
SAFE_DECAY = (
    -5.0
)  # the least log-decay of a token that the sixteen tokens of a tile may have: e^80 is in the range of fp32


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
    """Outputs `[b t h v]` in v's dtype and the last state, fp32 `[b h k v]`. Shapes as in `delta_rule.py`."""
    del bounded
    if kernel == "naive":
        return chunk_naive(q, k, v, g, beta, first, state, chunk=chunk)
    return recurrent(q, k, v, g, beta, first, state)


def chunk_flops(t: int, k: int, v: int, chunk: int) -> int:
    """Matmul FLOPs of t tokens of one head in chunks."""
    return 2 * t * (2 * chunk * k + chunk * v + 3 * k * v)
