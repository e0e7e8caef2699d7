"""Position settings of an attention layer. `conf/rope/*.yaml` picks one; `null` means no position encoding (NoPE)."""

import dataclasses

from jax import Array

from jaxllm.errors import UserError
from jaxllm.ops.rope import inverse_frequencies, rotate, rotation


@dataclasses.dataclass(frozen=True, kw_only=True)
class RoPE:
    """Plain rotary embedding: `f_i = theta^(-2i/dim)` on the first `dim = int(head_dim * partial)` channels.

    theta: base wavelength factor. partial: share of the head's channels that turn. interleaved: pair (2i, 2i+1) instead of
    (i, i + dim/2).
    """

    theta: float = 10000.0
    partial: float = 1.0
    interleaved: bool = False

    def __post_init__(self) -> None:
        if self.theta <= 0 or not 0 < self.partial <= 1:
            raise UserError(f"rope: theta={self.theta} must be > 0 and partial={self.partial} in (0, 1]")

    def dim(self, head_dim: int) -> int:
        """Channels that turn; must be even."""
        dim = int(head_dim * self.partial)
        if dim % 2 or dim == 0:
            raise UserError(
                f"rope.partial: {self.partial} of head_dim {head_dim} gives {dim} channels; needs an even number > 0"
            )
        return dim

    def angles(self, positions: Array, head_dim: int) -> tuple[Array, Array]:
        """`cos, sin` fp32 `[b, t, dim/2]` for `positions [b, t]`."""
        return rotation(positions, inverse_frequencies(self.dim(head_dim), self.theta))

    def __call__(self, x: Array, angles: tuple[Array, Array]) -> Array:
        """Turn `x [b, t, h, k]`."""
        return rotate(x, *angles, interleaved=self.interleaved)
