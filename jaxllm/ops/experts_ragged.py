"""Dropless experts by grouped matrix products, which GPUs and TPUs have kernels for: `lax.ragged_dot`, or tokamax's where it is installed.

    rows sorted by expert [nk d], one product for each group of rows with its own expert's matrix

No row is padded. On CPU XLA computes such a product densely, every expert for every row: there `experts_sorted` is the fast path.
"""

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from jaxllm.ops.experts import Experts, Unit
from jaxllm.ops.glu import glu
from jaxllm.ops.queues import from_slots, line_up, to_slots

Product = Callable[[Array, Array, Array], Array]


def grouped_product(x: Array, w: Array, sizes: Array) -> Array:
    """`x [m d], w [e d f], sizes int32 [e]` -> `[m f]` in the dtype of x, accumulated in fp32. Rows beyond `sum(sizes)` are anything."""
    if jax.default_backend() != "cpu" and importlib.util.find_spec("tokamax") is not None:
        tokamax: Any = importlib.import_module("tokamax")
        return tokamax.ragged_dot(x, w, group_sizes=sizes, preferred_element_type=jnp.float32).astype(x.dtype)
    return lax.ragged_dot(x, w, sizes, preferred_element_type=jnp.float32).astype(x.dtype)


def experts_ragged(
    x: Array, experts: Array, weights: Array, w: Experts, unit: Unit, product: Product = grouped_product
) -> Array:
    """`x [n d]`, experts int32 `[n k]`, weights fp32 `[n k]` -> `[n d]`; see `jaxllm.ops.experts` for the rest."""
    (n, k), e = experts.shape, w.number
    queues = line_up(experts, e)
    total = jnp.sum(queues.counts)
    real = (jnp.arange(n * k) < total)[:, None]
    order = jnp.where(real[:, 0], queues.order, n * k)
    place = jnp.where(queues.place < total, queues.place, n * k)
    # A product may leave anything in the rows of no group: what comes of them is cut off, and so are their gradients.
    rows = to_slots(x, order, place)
    group = jnp.repeat(jnp.arange(e), queues.counts, total_repeat_length=n * k)

    def biased(y: Array, bias: Array | None) -> Array:
        y = jnp.where(real, y, 0)
        return y if bias is None else y + jnp.take(bias, group, axis=0, mode="clip")

    gate = biased(product(rows, w.gate, queues.counts), w.gate_bias)
    up = biased(product(rows, w.up, queues.counts), w.up_bias)
    out = biased(product(glu(gate, up, *unit), w.down, queues.counts), w.down_bias)
    p = to_slots(weights.reshape(-1, 1), order, place.reshape(-1, 1))
    return from_slots(out.astype(jnp.float32) * p, order, place).astype(x.dtype)
