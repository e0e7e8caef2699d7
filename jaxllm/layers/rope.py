"""Position settings of an attention layer. `conf/rope/*.yaml` picks one; `null` means no position encoding (NoPE).

Every kind is a rule for frequencies and, for two of them, a factor on cos and sin. Most stretch a model trained on short texts to
`factor` times longer ones; a factor of 1 is plain RoPE (except with dynamic NTK, which grows with the call even then).
"""

import dataclasses
import math

import numpy as np
from jax import Array

from jaxllm.errors import UserError
from jaxllm.ops import rope as ops


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

    def frequencies(self, head_dim: int, length: int) -> np.ndarray:
        """float32 `[dim/2]` for a call of `length` tokens a row (only two kinds look at the length)."""
        del length
        return ops.inverse_frequencies(self.dim(head_dim), self.theta)

    @property
    def magnitude(self) -> float:
        """Factor on cos and sin: `q k` grows by its square."""
        return 1.0

    def attention_scale(self, head_dim: int) -> float:
        """Factor on MLA's softmax scale: only a slice of its heads is rotated, so `magnitude` does not reach all of `q k`."""
        del head_dim
        return 1.0

    def check_cache(self, length: int) -> None:
        """Raise where calls with a cache of `length` tokens would not agree with the call on the whole sequence."""

    def angles(self, positions: Array, head_dim: int) -> tuple[Array, Array]:
        """`cos, sin` fp32 `[b, t, dim/2]` for `positions [b, t]`."""
        return ops.rotation(positions, self.frequencies(head_dim, positions.shape[1]), self.magnitude)

    def __call__(self, x: Array, angles: tuple[Array, Array]) -> Array:
        """Turn `x [b, t, h, k]`."""
        return ops.rotate(x, *angles, interleaved=self.interleaved)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Stretched(RoPE):
    factor: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.factor < 1:
            raise UserError(f"rope.factor: {self.factor} must be at least 1, the new context over the old one")


@dataclasses.dataclass(frozen=True, kw_only=True)
class LinearRoPE(_Stretched):
    """Position interpolation: `f_i / factor`, all positions squeezed alike (arXiv 2306.15595)."""

    def frequencies(self, head_dim: int, length: int) -> np.ndarray:
        del length
        return ops.linear_frequencies(self.dim(head_dim), self.theta, self.factor)


@dataclasses.dataclass(frozen=True, kw_only=True)
class NTKRoPE(_Stretched):
    """NTK-aware: `theta factor^(dim/(dim-2))` in the place of theta; near positions keep their resolution."""

    def dim(self, head_dim: int) -> int:
        if (dim := super().dim(head_dim)) < 4:
            raise UserError(f"rope.partial: NTK scaling needs at least 4 channels that turn, got {dim} of {head_dim}")
        return dim

    def frequencies(self, head_dim: int, length: int) -> np.ndarray:
        dim = self.dim(head_dim)
        return ops.inverse_frequencies(dim, ops.ntk_theta(dim, self.theta, self._stretch(length)))

    def _stretch(self, length: int) -> float:
        del length
        return self.factor


@dataclasses.dataclass(frozen=True, kw_only=True)
class DynamicNTKRoPE(NTKRoPE):
    """NTK-aware with a stretch that grows with the call: `factor L / max_position - (factor - 1)` for L > max_position, else 1.

    The frequencies of a call depend on its length (of the whole row, padding included), so keys that were cached in a shorter call
    are wrong in a longer one, and a prefix does not give what the whole gives. length: null = that of each call, which works on
    whole sequences only; a number = always that of so long a call, which then agrees with itself, cached or not.
    """

    max_position: int
    length: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_position < 1 or (self.length is not None and self.length < 1):
            raise UserError(f"rope: max_position={self.max_position} and length={self.length} must be at least 1")

    def _stretch(self, length: int) -> float:
        return ops.dynamic_stretch(self.factor, self.length or length, self.max_position)

    def check_cache(self, length: int) -> None:
        if self.length is None:
            raise UserError(
                f"rope.length: null lets frequencies follow each call, so cached keys would not fit; fix it, e.g. length={length}"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class YaRN(_Stretched):
    """By parts: fast channels keep their frequency, slow ones have it divided by factor (arXiv 2309.00071; `ops.yarn_frequencies`).

    Two separate factors make up for the flatter scores, with `m(x) = 0.1 x ln(factor) + 1`:

    - on cos and sin: attention_factor; null = `m(mscale) / m(mscale_all_dim)` where both are given and not 0, else `m(1)`;
    - on MLA's softmax scale: `m(mscale_all_dim)^2` where that is given (DeepSeek-V2, V3). Attention of other kinds does not use it.
    """

    original_max_position: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.original_max_position < 1 or not 0 < self.beta_slow < self.beta_fast:
            raise UserError(
                f"rope: original_max_position={self.original_max_position} must be at least 1 and beta_slow={self.beta_slow} between"
                f" 0 and beta_fast={self.beta_fast}"
            )
        if self.theta <= 1:
            raise UserError(f"rope.theta: {self.theta} must be above 1 for YaRN, whose ramp divides by its logarithm")

    def frequencies(self, head_dim: int, length: int) -> np.ndarray:
        del length
        return ops.yarn_frequencies(
            self.dim(head_dim),
            self.theta,
            self.factor,
            self.original_max_position,
            beta_fast=self.beta_fast,
            beta_slow=self.beta_slow,
            truncate=self.truncate,
        )

    @property
    def magnitude(self) -> float:
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return ops.yarn_magnitude(self.factor, self.mscale) / ops.yarn_magnitude(self.factor, self.mscale_all_dim)
        return ops.yarn_magnitude(self.factor)

    def attention_scale(self, head_dim: int) -> float:
        return ops.yarn_magnitude(self.factor, self.mscale_all_dim) ** 2 if self.mscale_all_dim else 1.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Llama3RoPE(_Stretched):
    """Llama 3.1: slow channels are divided by factor, fast ones kept, a ramp between (`ops.llama3_frequencies`)."""

    original_max_position: int
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.original_max_position < 1 or self.low_freq_factor >= self.high_freq_factor:
            raise UserError(
                f"rope: original_max_position={self.original_max_position} must be at least 1 and"
                f" low_freq_factor={self.low_freq_factor} below high_freq_factor={self.high_freq_factor}"
            )

    def frequencies(self, head_dim: int, length: int) -> np.ndarray:
        del length
        return ops.llama3_frequencies(
            self.dim(head_dim),
            self.theta,
            self.factor,
            self.original_max_position,
            low_freq_factor=self.low_freq_factor,
            high_freq_factor=self.high_freq_factor,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class LongRoPE(_Stretched):
    """A searched divisor for each frequency: one list for short calls, one for long ones (arXiv 2402.13753; Phi-3).

    attention_factor: on cos and sin; null = `sqrt(1 + ln(factor) / ln(original_max_position))`. use_long: which list; null = the long
    one for a call of more than original_max_position tokens a row. Keys that were cached with one list are wrong with the other, so
    a cache that could outgrow original_max_position needs the choice made beforehand.
    """

    short_factor: tuple[float, ...]
    long_factor: tuple[float, ...]
    original_max_position: int
    attention_factor: float | None = None
    use_long: bool | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.original_max_position < 2 or any(e <= 0 for e in (*self.short_factor, *self.long_factor)):
            raise UserError(
                f"rope: original_max_position={self.original_max_position} must be at least 2, short_factor and long_factor above 0"
            )

    def dim(self, head_dim: int) -> int:
        dim = super().dim(head_dim)
        for name in ("short_factor", "long_factor"):
            if (count := len(getattr(self, name))) != dim // 2:
                raise UserError(f"rope.{name}: {count} numbers for {dim} channels that turn; needs {dim // 2}")
        return dim

    def frequencies(self, head_dim: int, length: int) -> np.ndarray:
        use_long = length > self.original_max_position if self.use_long is None else self.use_long
        return ops.longrope_frequencies(
            self.dim(head_dim), self.theta, self.long_factor if use_long else self.short_factor
        )

    @property
    def magnitude(self) -> float:
        if self.attention_factor is not None:
            return self.attention_factor
        return math.sqrt(1 + math.log(self.factor) / math.log(self.original_max_position))

    def check_cache(self, length: int) -> None:
        if self.use_long is None and length > self.original_max_position:
            raise UserError(
                f"rope.use_long: null, and a cache of {length} tokens may outgrow original_max_position={self.original_max_position},"
                f" where the frequencies change; set use_long=true for long texts, false for short ones"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProportionalRoPE(_Stretched):
    """Frequencies over the whole head of which only the first `partial` turn: `theta^(-2i/head_dim) / factor`, else 0 (Gemma 4).

    Unlike `partial` elsewhere, pairs span the head (half-split: i with i + head_dim/2) and the exponent divides by head_dim.
    """

    def dim(self, head_dim: int) -> int:
        if head_dim % 2 or int(self.partial * head_dim // 2) == 0:
            raise UserError(f"rope.partial: {self.partial} of head_dim {head_dim} leaves no pair of channels to turn")
        return head_dim

    def frequencies(self, head_dim: int, length: int) -> np.ndarray:
        del length
        return ops.proportional_frequencies(self.dim(head_dim), self.theta, self.partial, self.factor)
