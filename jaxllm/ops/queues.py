"""Who is computed where: choices lined up by expert, and rows carried there and back by gathers alone.

N tokens make k choices each, numbered token by token; number `n k` stands for none. A choice outside `[0, e)` joins no queue.
A *slot* is a row of an array in which experts compute, `C` slots an expert. Slots know their choice (`rows`), choices their slot
(`slot`), so that neither direction, nor its gradient, has to scatter rows, which CPUs do one by one.
"""

import functools
import operator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array


class Queues(NamedTuple):
    """order: int32 `[nk]`, choices sorted by expert, then by their turn. place: int32 `[n k]`, where in it each choice stands.
    counts, starts: int32 `[e]`, how many choose each expert, and where its queue starts."""

    order: Array
    place: Array
    counts: Array
    starts: Array


def count(experts: Array, number: int) -> Array:
    """How often each of `number` experts was chosen: int32 of any shape -> fp32 `[e]`. Entries outside are not counted."""
    chosen = jnp.where((experts >= 0) & (experts < number), experts, number).reshape(-1)
    return jnp.zeros(number + 1, jnp.float32).at[chosen].add(1.0)[:number]


def line_up(experts: Array, number: int, *, by_choice: bool = False) -> Queues:
    """experts int32 `[n k]`. Turns go token by token, or with by_choice all first choices stand before all second ones."""
    n, k = experts.shape
    chosen = jnp.where((experts >= 0) & (experts < number), experts, number)
    queue = (chosen.T if by_choice else chosen).reshape(-1)
    order = jnp.argsort(queue, stable=True).astype(jnp.int32)
    place = jnp.zeros(n * k, jnp.int32).at[order].set(jnp.arange(n * k, dtype=jnp.int32), unique_indices=True)
    if by_choice:  # back to numbers that go token by token
        order, place = order % n * k + order // n, place.reshape(k, n).T
    counts = count(chosen, number).astype(jnp.int32)
    return Queues(order, place.reshape(n, k), counts, jnp.cumsum(counts) - counts)


def seats(queues: Queues, experts: Array, capacity: int) -> tuple[Array, Array]:
    """The first `capacity` of each queue get slots: `rows` int32 `[e c]`, flattened, and `slot` int32 `[n k]` (`e c` = none)."""
    number, none = queues.counts.shape[0], queues.order.shape[0]
    inside = (experts >= 0) & (experts < number)
    rank = queues.place - jnp.take(queues.starts, experts, mode="clip")
    slot = jnp.where(inside & (rank < capacity), experts * capacity + rank, number * capacity)
    c = jnp.arange(capacity, dtype=jnp.int32)
    rows = jnp.take(queues.order, queues.starts[:, None] + c, mode="clip")
    return jnp.where(c < queues.counts[:, None], rows, none).reshape(-1), slot


def rows_of(x: Array, choices: Array, k: int) -> Array:
    """The token's row of `x [n ..]` for each choice; for none, that of some token."""
    return jnp.take(x, choices // k, axis=0, mode="clip")


def share(weights: Array, choices: Array) -> Array:
    """The entry of `weights [n k]` of each choice; 0 for none."""
    return jnp.where(choices < weights.size, jnp.take(weights.reshape(-1), choices, mode="clip"), 0)


def gather_back(y: Array, slot: Array) -> Array:
    """`y [m ..]`, `slot [n k]` -> `[n k ..]`, zeros where a choice has no slot."""
    there = (slot < y.shape[0]).reshape(*slot.shape, *(1,) * (y.ndim - 1))
    return jnp.where(there, jnp.take(y, slot, axis=0, mode="clip"), 0)


def sum_back(y: Array, slot: Array, weights: Array) -> Array:
    """`y [m d]`, `slot [n k]`, `weights [n k]` -> `[n d]`: each token the weighted sum of its choices' slots; choices without one add 0,
    whatever their weight. Choice by choice, which XLA fuses into one pass; gathered all at once they would be written down first."""
    weights = jnp.where(slot < y.shape[0], weights, 0)
    return functools.reduce(
        operator.add, (gather_back(y, slot[:, j]) * weights[:, j, None] for j in range(slot.shape[1]))
    )


@jax.custom_vjp
def to_slots(x: Array, rows: Array, slot: Array) -> Array:
    """`x [n ..]` to the slots of its tokens' choices, `[m ..]`; zeros in empty slots. rows int32 `[m]`, slot int32 `[n k]`."""
    empty = (rows >= slot.size).reshape(-1, *(1,) * (x.ndim - 1))
    return jnp.where(empty, 0, rows_of(x, rows, slot.shape[1]))


@jax.custom_vjp
def from_slots(y: Array, rows: Array, slot: Array) -> Array:
    """The other way: `y [m ..]` to `[n ..]`, each token the sum of its choices' slots."""
    return jnp.sum(gather_back(y, slot), axis=1, dtype=jnp.float32).astype(y.dtype)


def _no_gradient(a: Array) -> np.ndarray:
    return np.zeros(a.shape, jax.dtypes.float0)


to_slots.defvjp(
    lambda x, rows, slot: (to_slots(x, rows, slot), (rows, slot)),
    lambda saved, dy: (from_slots(dy, *saved), *map(_no_gradient, saved)),
)
from_slots.defvjp(
    lambda y, rows, slot: (from_slots(y, rows, slot), (rows, slot)),
    lambda saved, dy: (to_slots(dy, *saved), *map(_no_gradient, saved)),
)
