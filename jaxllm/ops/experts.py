"""Experts: many small gated layers of which each token uses a few. The naive truth, and the two paths of one device.

    y_n = sum_j weights_nj E_{experts_nj}(x_n),      E_e(x) = glu(x G_e + g_e, x U_e + u_e) D_e + d_e

| path | what it does | cost grows with |
| --- | --- | --- |
| experts_dense | every expert for every token: the truth | N E |
| experts_few | gathers the weights of the chosen experts, token by token | N k, and N k copies of an expert |
| experts_sorted (`jaxllm.ops.experts_sorted`) | sorts tokens by expert and multiplies expert by expert | N k |

Shapes: `x [n d]`, `experts` int32 `[n k]`, `weights` fp32 `[n k]`, results `[n d]` in the dtype of x. An entry of `experts` outside
`[0, e)` chooses nothing: it costs nothing that depends on it, counts nowhere and has no gradient. So padding is never routed, and a
device can be handed choices among experts that it does not hold.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from jaxllm.ops.glu import glu


class Experts(NamedTuple):
    """Weights of E experts: `gate [e d f], up [e d f], down [e f d]` and, where there are biases, `[e f], [e f], [e d]`."""

    gate: Array
    up: Array
    down: Array
    gate_bias: Array | None = None
    up_bias: Array | None = None
    down_bias: Array | None = None

    @property
    def number(self) -> int:
        return self.gate.shape[0]


class Unit(NamedTuple):
    """The gated unit inside an expert: one of `jaxllm.ops.glu.GLUS`, and its limit."""

    kind: str = "swiglu"
    limit: float | None = None


def hidden_layer(x: Array, w: Experts, unit: Unit) -> Array:
    """`x [e c d]` -> `[e c f]`, each expert on rows of its own."""
    gate, up = jnp.einsum("ecd,edf->ecf", x, w.gate), jnp.einsum("ecd,edf->ecf", x, w.up)
    if w.gate_bias is not None and w.up_bias is not None:
        gate, up = gate + w.gate_bias[:, None], up + w.up_bias[:, None]
    return glu(gate, up, *unit)


def experts_dense(x: Array, experts: Array, weights: Array, w: Experts, unit: Unit) -> Array:
    """The truth: every expert sees every token, and what was not chosen has weight 0."""
    e = w.number
    each = jnp.sum(jnp.where(experts[..., None] == jnp.arange(e), weights[..., None], 0.0), axis=1)  # [n e]
    hidden = hidden_layer(jnp.broadcast_to(x, (e, *x.shape)), w, unit)
    out = jnp.einsum("enf,efd->end", hidden, w.down, preferred_element_type=jnp.float32)
    if w.down_bias is not None:
        out = out + w.down_bias[:, None]
    return jnp.einsum("ne,end->nd", each, out).astype(x.dtype)


def experts_few(x: Array, experts: Array, weights: Array, w: Experts, unit: Unit) -> Array:
    """For a handful of tokens (a decode step): read the chosen experts and no other."""
    n, k = experts.shape
    number = w.number
    chosen = (experts >= 0) & (experts < number)
    index = jnp.where(chosen, experts, 0).reshape(-1)
    mine: Experts = jax.tree.map(lambda a: jnp.take(a, index, axis=0, mode="clip"), w)
    rows = jnp.repeat(x, k, axis=0)[:, None]  # [nk 1 d]
    hidden = hidden_layer(rows, mine, unit)
    out = jnp.einsum("ecf,efd->ecd", hidden, mine.down, preferred_element_type=jnp.float32)[:, 0]
    if mine.down_bias is not None:
        out = out + mine.down_bias
    share = jnp.where(chosen, weights, 0.0)
    return jnp.sum(out.reshape(n, k, -1) * share[..., None], axis=1).astype(x.dtype)
