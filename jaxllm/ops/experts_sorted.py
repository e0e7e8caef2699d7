"""Dropless experts on one device: tokens sorted by expert, one batched product for all experts, a loop for what did not fit.

Each expert gets C rows of one array `[e c d]`, C being a little more than an even share, and all experts are multiplied in one batched
product, which needs no copy of a weight (a loop over experts copies each weight it slices). Whatever an expert was chosen for beyond
C rows is done in blocks of B rows of one expert, by a loop with as many turns as there are such blocks: none when load is even. So
the result is exact under any routing, and time grows with the number of choices N k, not with the number of experts.

The backward pass is written out, for two reasons: a loop of unknown length has none of its own, and autodiff would scatter. Every
product with weights is done once, gate and up are kept, and rows travel by gathers both ways: the slots know their token, the tokens
their slots.

    h = p glu(g, u)    y_n = sum of its slots' h D        (p: the weight of the choice, moved before the product)
    dh' = dy D^T       dp = sum_f glu(g, u) dh'           dg, du = pull-back of glu at p dh'
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jaxllm.ops.experts import Experts, Unit
from jaxllm.ops.glu import glu
from jaxllm.ops.queues import gather_back, line_up, rows_of, seats, share


class Plan(NamedTuple):
    """Where each choice is computed (`jaxllm.ops.queues`). order: int32 `[nk + B]`, the queues one after another; starts, counts: int32
    `[e]`, where they are. slot: int32 `[n k]`, rows: int32 `[e c]`."""

    order: Array
    starts: Array
    counts: Array
    slot: Array
    rows: Array


SMALL = 2048  # rows of all experts up to which each expert gets one for every token: less than what a loop costs


def capacity_of(tokens: int, choices: int, experts: int) -> int:
    """Rows an expert gets: an even share and a standard deviation of a fair draw, in multiples of 8. More is padding for every expert,
    less is a loop for most.

    A token chooses an expert once, so `tokens` rows are enough for anything; few tokens get them.
    """
    if tokens * experts <= SMALL:
        return tokens
    share = choices / experts
    return min(tokens, 8 * max(1, round((share + share**0.5) / 8)))


def block_of(tokens: int, capacity: int) -> int:
    """Rows of a turn of the loop: about a quarter of what an expert gets, so that a turn is neither empty nor a copy for few."""
    return 0 if capacity >= tokens else min(capacity, max(8, capacity // 4 // 8 * 8))


def make_plan(experts: Array, number: int, capacity: int, block: int = 0, *, by_choice: bool = False) -> Plan:
    """experts int32 `[n k]`; by_choice: see `line_up`."""
    queues = line_up(experts, number, by_choice=by_choice)
    rows, slot = seats(queues, experts, capacity)
    order = jnp.pad(queues.order, (0, block), constant_values=experts.size)  # the last block may reach beyond the end
    return Plan(order, queues.starts, queues.counts, slot, rows)


def experts_sorted(
    x: Array, experts: Array, weights: Array, w: Experts, unit: Unit, capacity: int | None = None
) -> Array:
    """See the module. capacity: C; null = `capacity_of`."""
    n = x.shape[0]
    capacity = capacity_of(n, experts.size, w.number) if capacity is None else capacity
    block = block_of(n, capacity)
    return apply_plan(x, weights, w, make_plan(experts, w.number, capacity, block), unit, capacity, block)


def experts_capacity(
    x: Array, experts: Array, weights: Array, w: Experts, unit: Unit, capacity: int
) -> tuple[Array, Array]:
    """Each expert computes its first `capacity` choices and drops the rest: first choices of all tokens before second ones (GShard,
    arXiv 2006.16668). Returns y and the number of choices dropped (fp32); a dropped choice adds exactly 0."""
    plan = make_plan(experts, w.number, capacity, by_choice=True)
    y = apply_plan(x, weights, w, plan, unit, capacity, 0)
    return y, jnp.sum(jnp.maximum(plan.counts - capacity, 0)).astype(jnp.float32)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5, 6))
def apply_plan(x: Array, weights: Array, w: Experts, plan: Plan, unit: Unit, capacity: int, block: int) -> Array:
    """`[n d]`. block: rows of a turn of the loop over what is beyond `capacity`; 0 = no loop."""
    return _forward(x, weights, w, plan, unit, capacity, block)[0]


def _product(form: str, a: Array, b: Array) -> Array:
    return jnp.einsum(form, a, b, preferred_element_type=jnp.float32)


def _biased(y: Array, bias: Array | None) -> Array:
    return y if bias is None else y + bias[:, None]


def _project(x: Array, w: Experts) -> tuple[Array, Array]:
    """`x [e c d]` -> gate, up `[e c f]`."""
    gate, up = jnp.einsum("ecd,edf->ecf", x, w.gate), jnp.einsum("ecd,edf->ecf", x, w.up)
    return _biased(gate, w.gate_bias), _biased(up, w.up_bias)


def _out(gate: Array, up: Array, p: Array, w: Experts, unit: Unit) -> Array:
    """gate, up `[e c f]`, p `[e c]` -> fp32 `[e c d]`."""
    hidden = (glu(gate, up, *unit).astype(jnp.float32) * p[..., None]).astype(gate.dtype)
    out = _product("ecf,efd->ecd", hidden, w.down)
    return out if w.down_bias is None else out + p[..., None] * w.down_bias[:, None]


def _pull(
    x: Array, gate: Array, up: Array, p: Array, dy: Array, w: Experts, unit: Unit
) -> tuple[Array, Array, Experts]:
    """Gradients to x `[e c d]`, p `[e c]` and the weights, from `dy [e c d]` of each row's token. fp32."""
    hidden, pull = jax.vjp(lambda g, u: glu(g, u, *unit), gate, up)
    back = _product("ecd,efd->ecf", dy, w.down)
    dp = jnp.sum(hidden.astype(jnp.float32) * back, axis=-1)
    dgate, dup = pull((back * p[..., None]).astype(hidden.dtype))
    weighted = (hidden.astype(jnp.float32) * p[..., None]).astype(hidden.dtype)
    dx = _product("ecf,edf->ecd", dgate, w.gate) + _product("ecf,edf->ecd", dup, w.up)
    bias: list[Array | None] = [None, None, None]
    if w.gate_bias is not None and w.up_bias is not None and w.down_bias is not None:
        shared = dy.astype(jnp.float32)
        dp = dp + jnp.einsum("ecd,ed->ec", shared, w.down_bias.astype(jnp.float32))
        down = jnp.einsum("ecd,ec->ed", shared, p)
        bias = [jnp.sum(dgate, axis=1, dtype=jnp.float32), jnp.sum(dup, axis=1, dtype=jnp.float32), down]
    return dx, dp, Experts(
        _product("ecd,ecf->edf", x, dgate),
        _product("ecd,ecf->edf", x, dup),
        _product("ecf,ecd->efd", weighted, dy),
        *bias,
    )  # fmt: skip


def _blocks(plan: Plan, capacity: int, block: int) -> tuple[Array, Array, Array]:
    """The loop over what is beyond capacity: its number of turns, and for each expert the turns up to and before it."""
    turns = -(-jnp.maximum(plan.counts - capacity, 0) // block)
    upto = jnp.cumsum(turns)
    return upto[-1], upto, upto - turns


def _turn(i: Array, plan: Plan, w: Experts, capacity: int, block: int) -> tuple[Array, Array, Experts]:
    """Expert, choices `[B]` and weights of turn i."""
    _, upto, before = _blocks(plan, capacity, block)
    e = jnp.sum(upto <= i).astype(jnp.int32)
    first = capacity + (i - before[e]) * block
    choices = lax.dynamic_slice(plan.order, (plan.starts[e] + first,), (block,))
    none = plan.slot.size
    choices = jnp.where(first + jnp.arange(block) < plan.counts[e], choices, none)
    return e, choices, jax.tree.map(lambda a: lax.dynamic_slice_in_dim(a, e, 1), w)


def _forward(x: Array, weights: Array, w: Experts, plan: Plan, unit: Unit, capacity: int, block: int) -> Any:
    d, k, e = x.shape[1], weights.shape[1], w.number
    p = share(weights, plan.rows).reshape(e, capacity)
    gate, up = _project(rows_of(x, plan.rows, k).reshape(e, capacity, d), w)
    out = _out(gate, up, p, w, unit).reshape(e * capacity, d)
    y = jnp.sum(gather_back(out, plan.slot), axis=1)  # fp32 [n d]

    def turn(i: Array, y: Array) -> Array:
        _, choices, mine = _turn(i, plan, w, capacity, block)
        gate, up = _project(rows_of(x, choices, k)[None], mine)
        return y.at[choices // k].add(_out(gate, up, share(weights, choices)[None], mine, unit)[0], mode="drop")

    if block:
        y = lax.fori_loop(0, _blocks(plan, capacity, block)[0], turn, y)
    return y.astype(x.dtype), (x, weights, w, plan, gate, up)


def _backward(unit: Unit, capacity: int, block: int, saved: Any, dy: Array) -> Any:
    x, weights, w, plan, gate, up = saved
    d, k, e = x.shape[1], weights.shape[1], w.number

    def rows(a: Array) -> Array:
        return rows_of(a, plan.rows, k).reshape(e, capacity, d)

    p = share(weights, plan.rows).reshape(e, capacity)
    dslot, dp, dw = _pull(rows(x), gate, up, p, rows(dy), w, unit)
    dx = jnp.sum(gather_back(dslot.reshape(-1, d), plan.slot), axis=1)
    dweights = gather_back(dp.reshape(-1), plan.slot).reshape(-1)

    def turn(i: Array, carry: Any) -> Any:
        dx, dweights, dw = carry
        expert, choices, mine = _turn(i, plan, w, capacity, block)
        xs, ys = rows_of(x, choices, k)[None], rows_of(dy, choices, k)[None]
        more, dp, part = _pull(xs, *_project(xs, mine), share(weights, choices)[None], ys, mine, unit)
        dx = dx.at[choices // k].add(more[0], mode="drop")
        dweights = dweights.at[choices].set(dp[0], mode="drop")
        return dx, dweights, jax.tree.map(lambda a, b: a.at[expert].add(b[0]), dw, part)

    if block:
        dx, dweights, dw = lax.fori_loop(0, _blocks(plan, capacity, block)[0], turn, (dx, dweights, dw))
    dw = jax.tree.map(lambda a, b: a.astype(b.dtype), dw, w)
    nothing = jax.tree.map(lambda a: np.zeros(a.shape, jax.dtypes.float0), plan)
    return dx.astype(x.dtype), dweights.reshape(weights.shape).astype(weights.dtype), dw, nothing


apply_plan.defvjp(_forward, _backward)
