"""A matrix and a product of low rank: `W + s A B`, for stacks of matrices whose sides may be several axes each."""

import string
from collections.abc import Sequence

import jax.numpy as jnp
from jax import Array


def low_rank_sum(
    w: Array, a: Array, b: Array, scale: Array, stack: Sequence[int], inputs: Sequence[int], outputs: Sequence[int]
) -> Array:
    """float32 in the shape of `w`. stack, inputs, outputs: axes of `w`. a `[*stack, *inputs, r]`, b `[*stack, r, *outputs]`; scale: one
    number, or one for each entry of the first axes."""
    letters = string.ascii_lowercase[: w.ndim]

    def named(axes: Sequence[int]) -> str:
        return "".join(letters[i] for i in axes)

    left, right = f"{named(stack)}{named(inputs)}Z", f"{named(stack)}Z{named(outputs)}"
    product = jnp.einsum(f"{left},{right}->{letters}", a, b, precision="highest", preferred_element_type=jnp.float32)
    return w.astype(jnp.float32) + scale.reshape(scale.shape + (1,) * (w.ndim - scale.ndim)) * product
