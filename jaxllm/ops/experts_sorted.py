"""Dropless experts on one device: tokens sorted by expert, one batched product for all experts, loops for what did not fit.

Each expert gets C rows of one array `[e c d]`, C being a little more than an even share, and all experts are multiplied in one batched
product, which needs no copy of a weight (a loop over experts copies each weight it slices). Whatever an expert was chosen for beyond
C rows is done in blocks of rows of one expert, by loops with as many turns as there are such blocks: none when load is even. So the
result is exact under any routing, and time grows with the number of choices N k, not with the number of experts.

The backward pass is written out, for two reasons: a loop of unknown length has none of its own, and autodiff would scatter. Every
product with weights is done once, gate and up are kept, and rows travel by gathers both ways: the slots know their token, the tokens
their slots. The weight of a choice, p, is taken where rows are gathered, and not on arrays as wide as the experts (but
for the gradients of gate and up biases).

    h = glu(x G, x U)      y_n = sum of p h D over the token's slots
    dh = dy D^T            dp = sum_f h dh                dg, du = pull-back of glu at dh
    dx_n = sum of p (dg G^T + du U^T)                     dG = (p x)^T dg    dU = (p x)^T du    dD = h^T (p dy)

`(p x)^T` is gathered as it stands there, width before rows: XLA's CPU products are slower where they have to transpose their left side.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jaxllm.ops.experts import Experts, Unit
from jaxllm.ops.glu import glu
from jaxllm.ops.queues import gather_back, line_up, rows_of, seats, share, sum_back


class Plan(NamedTuple):
    """Where each choice is computed (`jaxllm.ops.queues`). order: int32 `[nk + B]`, the queues one after another, and room for a last block
    of B rows; starts, counts: int32 `[e]`, where they are. slot: int32 `[n k]`, rows: int32 `[e c]`."""

    order: Array
    starts: Array
    counts: Array
    slot: Array
    rows: Array


SMALL = 2048  # rows of all experts up to which each expert gets one for every token: less than what a loop costs


def capacity_of(tokens: int, choices: int, experts: int) -> int:
    """Rows an expert gets: an even share and one and a half standard deviations of a fair draw, rounded to a multiple of 8 (280 for 256, 80
    for 64). More is padding for every expert, less is a loop for most.

    A token chooses an expert once, so `tokens` rows are enough for anything; few tokens get them.
    """
    if tokens * experts <= SMALL:
        return tokens
    share = choices / experts
    return min(tokens, 8 * max(1, round((share + 1.5 * share**0.5) / 8)))


def blocks_of(tokens: int, capacity: int) -> tuple[int, ...]:
    """Rows of a turn, loop by loop: a quarter of what an expert gets, up to a multiple of 64, then 16. A turn copies an expert's weights
    and adds to their gradients, whatever it has to do: many rows at once are cheaper where many are left, few where few are."""
    return () if capacity >= tokens else (-(-capacity // 256) * 64, 16)


def make_plan(
    experts: Array, number: int, capacity: int, blocks: tuple[int, ...] = (), *, by_choice: bool = False
) -> Plan:
    """experts int32 `[n k]`; by_choice: see `line_up`."""
    queues = line_up(experts, number, by_choice=by_choice)
    rows, slot = seats(queues, experts, capacity)
    reach = max(blocks, default=0)  # a last block may go beyond the end
    order = jnp.pad(queues.order, (0, reach), constant_values=experts.size)
    return Plan(order, queues.starts, queues.counts, slot, rows)


def experts_sorted(
    x: Array, experts: Array, weights: Array, w: Experts, unit: Unit, capacity: int | None = None
) -> Array:
    """See the module. capacity: C; null = `capacity_of`."""
    n = x.shape[0]
    capacity = capacity_of(n, experts.size, w.number) if capacity is None else capacity
    blocks = blocks_of(n, capacity)
    return apply_plan(x, weights, w, make_plan(experts, w.number, capacity, blocks), unit, capacity, blocks)


def experts_capacity(
    x: Array, experts: Array, weights: Array, w: Experts, unit: Unit, capacity: int
) -> tuple[Array, Array]:
    """Each expert computes its first `capacity` choices and drops the rest: first choices of all tokens before second ones (GShard,
    arXiv 2006.16668). Returns y and the number of choices dropped (fp32); a dropped choice adds exactly 0."""
    plan = make_plan(experts, w.number, capacity, by_choice=True)
    y = apply_plan(x, weights, w, plan, unit, capacity, ())
    return y, jnp.sum(jnp.maximum(plan.counts - capacity, 0)).astype(jnp.float32)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5, 6))
def apply_plan(
    x: Array, weights: Array, w: Experts, plan: Plan, unit: Unit, capacity: int, blocks: tuple[int, ...]
) -> Array:
    """`[n d]`. blocks: rows of a turn of each loop over what is beyond `capacity`; without loops that is dropped."""
    return _forward(x, weights, w, plan, unit, capacity, blocks)[0]


def _product(form: str, a: Array, b: Array) -> Array:
    return jnp.einsum(form, a, b, preferred_element_type=jnp.float32)


def _biased(y: Array, bias: Array | None) -> Array:
    return y if bias is None else y + bias[:, None]


def _project(x: Array, w: Experts) -> tuple[Array, Array]:
    """`x [e c d]` -> gate, up `[e c f]`."""
    gate, up = jnp.einsum("ecd,edf->ecf", x, w.gate), jnp.einsum("ecd,edf->ecf", x, w.up)
    return _biased(gate, w.gate_bias), _biased(up, w.up_bias)


def _out(gate: Array, up: Array, w: Experts, unit: Unit) -> Array:
    """gate, up `[e c f]` -> fp32 `[e c d]`, without the weights of the choices."""
    return _biased(_product("ecf,efd->ecd", glu(gate, up, *unit), w.down), w.down_bias)


def _tokens_of(choices: Array, weights: Array) -> tuple[Array, Array]:
    """Token and weight of each choice; for none, some token and 0. Made once: a loop over a gather would divide at every element."""
    n, k = weights.shape
    return lax.optimization_barrier((jnp.minimum(choices // k, n - 1), share(weights, choices)))


def _gather_turned(x: Array, tokens: Array, p: Array) -> Array:
    """`p x` of tokens `[e c]` as `[e d c]`. On CPU element by element: XLA would give a transposition back to the product."""
    if jax.default_backend() != "cpu":
        return jnp.swapaxes((jnp.take(x, tokens, axis=0, mode="clip") * p[..., None]).astype(x.dtype), 1, 2)
    across = jnp.arange(x.shape[1], dtype=jnp.int32)[None, :, None]
    rows = x.at[tokens[:, None], across].get(mode="promise_in_bounds")
    return (rows * p[:, None]).astype(x.dtype)


def _pull(
    x: Array, dy: Array, tokens: Array, p: Array, gate: Array, up: Array, w: Experts, unit: Unit
) -> tuple[Array, Array, Experts]:
    """Gradients to the rows `[e c d]` of tokens `[e c]`, without their weight; to p `[e c]`; and to the weights. fp32.

    x, dy `[n d]`: of all tokens. gate, up `[e c f]`: of these.
    """
    rows = jnp.take(dy, tokens, axis=0, mode="clip")
    hidden, pull = jax.vjp(lambda g, u: glu(g, u, *unit), gate, up)
    back = _product("ecd,efd->ecf", rows, w.down)
    dp = jnp.sum(hidden.astype(jnp.float32) * back, axis=-1)
    dgate, dup = pull(back.astype(hidden.dtype))
    dx = _product("ecf,edf->ecd", dgate, w.gate) + _product("ecf,edf->ecd", dup, w.up)
    xs, ys = _gather_turned(x, tokens, p), (rows * p[..., None]).astype(dy.dtype)
    bias: list[Array | None] = [None, None, None]
    if w.gate_bias is not None and w.up_bias is not None and w.down_bias is not None:
        dp = dp + _product("ecd,ed->ec", rows, w.down_bias)
        bias = [_product("ec,ecf->ef", p, dgate), _product("ec,ecf->ef", p, dup)]
        bias.append(jnp.sum(ys, axis=1, dtype=jnp.float32))
    return dx, dp, Experts(
        _product("edc,ecf->edf", xs, dgate),
        _product("edc,ecf->edf", xs, dup),
        _product("ecf,ecd->efd", hidden, ys),
        *bias,
    )  # fmt: skip


class Loop(NamedTuple):
    """A loop over what is beyond capacity, `rows` rows of one expert a turn. first int32 `[e]`: where in its queue each expert starts;
    upto, before int32 `[e]`: the turns of all experts up to each one, with and without it."""

    rows: int
    first: Array
    upto: Array
    before: Array


def _loops(plan: Plan, capacity: int, blocks: tuple[int, ...]) -> list[Loop]:
    """Full blocks, and one more for a rest that would take the next, smaller blocks more than two turns; the last loop takes every rest."""
    loops, first = [], jnp.minimum(plan.counts, capacity)
    for rows, smaller in zip(blocks, (*blocks, 0)[1:], strict=True):
        left = plan.counts - first
        turns = left // rows + (left % rows > 2 * smaller)
        upto = jnp.cumsum(turns)
        loops.append(Loop(rows, first, upto, upto - turns))
        first = jnp.minimum(plan.counts, first + turns * rows)
    return loops


def _turn(i: Array, loop: Loop, plan: Plan, w: Experts) -> tuple[Array, Array, Experts]:
    """Expert, choices `[rows]` and weights of turn i."""
    e = jnp.sum(loop.upto <= i).astype(jnp.int32)
    first = loop.first[e] + (i - loop.before[e]) * loop.rows
    choices = lax.dynamic_slice(plan.order, (plan.starts[e] + first,), (loop.rows,))
    none = plan.slot.size
    choices = jnp.where(first + jnp.arange(loop.rows) < plan.counts[e], choices, none)
    return e, choices, jax.tree.map(lambda a: lax.dynamic_slice_in_dim(a, e, 1), w)


def _forward(
    x: Array, weights: Array, w: Experts, plan: Plan, unit: Unit, capacity: int, blocks: tuple[int, ...]
) -> Any:
    d, k, e = x.shape[1], weights.shape[1], w.number
    gate, up = _project(rows_of(x, plan.rows, k).reshape(e, capacity, d), w)
    y = sum_back(_out(gate, up, w, unit).reshape(-1, d), plan.slot, weights)  # fp32 [n d]

    def turn(loop: Loop, i: Array, y: Array) -> Array:
        _, choices, mine = _turn(i, loop, plan, w)
        gate, up = _project(rows_of(x, choices, k)[None], mine)
        return y.at[choices // k].add(_out(gate, up, mine, unit)[0] * share(weights, choices)[:, None], mode="drop")

    for loop in _loops(plan, capacity, blocks):
        y = lax.fori_loop(0, loop.upto[-1], functools.partial(turn, loop), y)
    return y.astype(x.dtype), (x, weights, w, plan, gate, up)


def _backward(unit: Unit, capacity: int, blocks: tuple[int, ...], saved: Any, dy: Array) -> Any:
    x, weights, w, plan, gate, up = saved
    d, e = x.shape[1], w.number
    # What glu makes on its way is cheaper made again than kept: the barrier keeps XLA from sharing it with the forward pass.
    gate, up = lax.optimization_barrier((gate, up))
    tokens, p = _tokens_of(plan.rows.reshape(e, capacity), weights)
    dslot, dp, dw = _pull(x, dy, tokens, p, gate, up, w, unit)
    dx = sum_back(dslot.reshape(-1, d), plan.slot, weights)
    dweights = gather_back(dp.reshape(-1), plan.slot).reshape(-1)

    def turn(loop: Loop, i: Array, carry: Any) -> Any:
        dx, dweights, dw = carry
        expert, choices, mine = _turn(i, loop, plan, w)
        tokens, p = _tokens_of(choices[None], weights)
        gate, up = _project(jnp.take(x, tokens, axis=0, mode="clip"), mine)
        more, dp, part = _pull(x, dy, tokens, p, gate, up, mine, unit)
        dx = dx.at[choices // weights.shape[1]].add(more[0] * p[0][:, None], mode="drop")
        dweights = dweights.at[choices].set(dp[0], mode="drop")
        return dx, dweights, jax.tree.map(lambda a, b: a.at[expert].add(b[0]), dw, part)

    for loop in _loops(plan, capacity, blocks):
        dx, dweights, dw = lax.fori_loop(0, loop.upto[-1], functools.partial(turn, loop), (dx, dweights, dw))
    dw = jax.tree.map(lambda a, b: a.astype(b.dtype), dw, w)
    nothing = jax.tree.map(lambda a: np.zeros(a.shape, jax.dtypes.float0), plan)
    return dx.astype(x.dtype), dweights.reshape(weights.shape).astype(weights.dtype), dw, nothing


apply_plan.defvjp(_forward, _backward)
