"""Kimi Delta Attention (Kimi Linear, arXiv 2510.26692; Kimi K3): the delta rule with a decay of its own for every channel."""

import dataclasses
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxllm.errors import UserError
from jaxllm.layers.base import Constant, fan_in, param
from jaxllm.layers.delta import DeltaMixer, Shape
from jaxllm.layers.norm import GatedRMSNorm
from jaxllm.ops.delta import SAFE_DECAY
from jaxllm.ops.linear import linear

GATE_FORMS = ("bounded", "softplus")


@dataclasses.dataclass(frozen=True)
class LogUniform:
    """Initialiser: `log U(low, high)`."""

    low: float
    high: float

    def __call__(self, key: Array, shape: tuple[int, ...], dtype: jnp.dtype) -> Array:
        return jnp.log(jax.random.uniform(key, shape, jnp.float32, self.low, self.high)).astype(dtype)

    def draw(self, rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
        return np.log(rng.uniform(self.low, self.high, shape)).astype(np.float32)


@dataclasses.dataclass(frozen=True)
class TimeStep:
    """Initialiser: the inverse softplus of steps drawn log-uniformly from [low, high] (Mamba, arXiv 2312.00752, section 3.6)."""

    low: float = 1e-3
    high: float = 1e-1
    floor: float = 1e-4

    def __call__(self, key: Array, shape: tuple[int, ...], dtype: jnp.dtype) -> Array:
        u = jax.random.uniform(key, shape, jnp.float32)
        step = jnp.maximum(jnp.exp(np.log(self.low) + u * np.log(self.high / self.low)), self.floor)
        return (step + jnp.log(-jnp.expm1(-step))).astype(dtype)

    def draw(self, rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
        step = np.maximum(np.exp(rng.uniform(np.log(self.low), np.log(self.high), shape)), self.floor)
        return (step + np.log(-np.expm1(-step))).astype(np.float32)


class KDA(DeltaMixer, kw_only=True):
    """The delta rule with a decay for every channel of the state; the frame is `DeltaMixer`.

        z = x W_fa W_fb + dt_bias;   beta = sigmoid(x W_b)
        g = g_min sigmoid(e^{A_log} z)           bounded (Kimi K3): decays between e^{g_min} and 1
        g = -e^{A_log} softplus(z)               softplus (Kimi Linear)
        y = concat_h(rms(o_h) w sigmoid(x W_ga W_gb)_h) W_o

    head_dim `k`: null = d_model / num_heads. value_dim `v`: null = head_dim. gate_form: bounded or softplus. gate_lower_bound: g_min,
    in [-5, 0): what keeps sixteen tokens' decays within the range of fp32 and bf16. gate_rank: of W_fa; output_gate_rank: of W_ga, 0 =
    one full matrix `W_g` (Kimi K3); null = head_dim.
    """

    num_heads: int
    head_dim: int | None = None
    value_dim: int | None = None
    gate_form: str = "bounded"
    gate_lower_bound: float = SAFE_DECAY
    gate_rank: int | None = None
    output_gate_rank: int | None = None

    def __post_init__(self) -> None:
        if self.num_heads < 1 or (self.head_dim is None and self.d_model % self.num_heads):
            raise UserError(
                f"num_heads: {self.num_heads} does not divide d_model={self.d_model}; set head_dim or change one"
            )
        if self.gate_form not in GATE_FORMS:
            raise UserError(f"gate_form: {self.gate_form!r} is not one of {', '.join(GATE_FORMS)}")
        if not SAFE_DECAY <= self.gate_lower_bound < 0:
            raise UserError(f"gate_lower_bound: {self.gate_lower_bound} must be in [{SAFE_DECAY}, 0)")
        if self.output_gate_rank is not None and self.output_gate_rank < 0:
            raise UserError(f"output_gate_rank: {self.output_gate_rank} must be at least 0 (0 = a full matrix)")
        super().__post_init__()

    # ---- what the frame asks -------------------------------------------------------------------------------------

    @property
    def sizes_checked(self) -> dict[str, int]:
        _, k, v = self.state_sizes
        return {"head_dim": k, "value_dim": v, "gate_rank": self.decay_rank}

    @property
    def state_sizes(self) -> tuple[int, int, int]:
        k = self.d_model // self.num_heads if self.head_dim is None else self.head_dim
        return self.num_heads, k, k if self.value_dim is None else self.value_dim

    @property
    def key_heads(self) -> int:
        return self.num_heads

    @property
    def decay_rank(self) -> int:
        return self.state_sizes[1] if self.gate_rank is None else self.gate_rank

    @property
    def out_rank(self) -> int:
        return self.state_sizes[1] if self.output_gate_rank is None else self.output_gate_rank

    @property
    def bounded(self) -> bool:
        return self.gate_form == "bounded"

    @property
    def recurrent_projections(self) -> dict[str, Shape]:
        return {"f_a": ((self.decay_rank,), ("latent",)), "b": ((self.num_heads,), ("heads",))}

    @property
    def gate_projections(self) -> dict[str, Shape]:
        h, _, v = self.state_sizes
        return {"g_a": ((self.out_rank,), ("latent",))} if self.out_rank else {"g": ((h, v), ("heads", "head"))}

    @property
    def inner_weights(self) -> tuple[int, int]:
        h, k, v = self.state_sizes
        return self.decay_rank * h * k, self.out_rank * h * v

    @property
    def vectors(self) -> int:
        h, k, v = self.state_sizes
        return h + h * k + v

    def decays(self, parts: Mapping[str, Array]) -> tuple[Array, Array]:
        h, k, _ = self.state_sizes
        r = self.decay_rank
        f_b = param(self, "f_b_proj", fan_in(r), (r, h, k), ("latent", "heads", "head"))
        start = Constant(0.0) if self.bounded else LogUniform(1.0, 16.0)
        scale = jnp.exp(param(self, "A_log", start, (h,), ("heads",)).astype(jnp.float32))[:, None]
        bias = param(self, "dt_bias", TimeStep(), (h, k), ("heads", "head")).astype(jnp.float32)
        z = linear(parts["f_a"], f_b.astype(self.dtype)).astype(jnp.float32) + bias
        if self.bounded:
            return self.gate_lower_bound * jax.nn.sigmoid(scale * z), self._beta(parts["b"])
        return -scale * jax.nn.softplus(z), self._beta(parts["b"])

    def gated_norm(self, out: Array, parts: Mapping[str, Array]) -> Array:
        h, _, v = self.state_sizes
        if self.out_rank:
            g_b = param(self, "g_b_proj", fan_in(self.out_rank), (self.out_rank, h, v), ("latent", "heads", "head"))
            gate = linear(parts["g_a"], g_b.astype(self.dtype))
        else:
            gate = parts["g"]
        norm = GatedRMSNorm(eps=self.norm_eps, param_dtype=self.param_dtype, name="o_norm")
        return norm(out, gate)
