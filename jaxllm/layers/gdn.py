"""Gated DeltaNet (Yang et al. 2024, arXiv 2412.06464), as Qwen3-Next has it: the delta rule with one decay a head."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jax import Array

from jaxllm.errors import UserError
from jaxllm.layers.base import param
from jaxllm.layers.delta import DeltaMixer, Shape
from jaxllm.layers.kda import LogUniform, TimeStep
from jaxllm.layers.norm import GatedRMSNorm
from jaxllm.ops.delta import chunk_flops


class GatedDeltaNet(DeltaMixer, kw_only=True):
    """The delta rule with a decay for every head of the state; the frame is `DeltaMixer`.

        g = -e^{A_log} softplus(x W_a + dt_bias);   beta = sigmoid(x W_b)
        y = concat_h(rms(o_h) w silu(x W_g)_h) W_o

    num_v_heads `h`: heads of the state. num_k_heads: of q and k, divides h (null = h); consecutive value heads share one. head_k_dim
    `k`: null = d_model / num_v_heads. head_v_dim `v`: null = head_k_dim.

    Decays start as in Mamba 2 and the authors' code, near 1: with dt_bias = 1 the state would be gone after each token.
    """

    num_v_heads: int
    num_k_heads: int | None = None
    head_k_dim: int | None = None
    head_v_dim: int | None = None

    def __post_init__(self) -> None:
        if self.num_v_heads < 1 or self.key_heads < 1 or self.num_v_heads % self.key_heads:
            raise UserError(f"num_k_heads: {self.num_k_heads} must divide num_v_heads={self.num_v_heads}")
        if self.head_k_dim is None and self.d_model % self.num_v_heads:
            raise UserError(
                f"num_v_heads: {self.num_v_heads} does not divide d_model={self.d_model}; set head_k_dim or change one"
            )
        super().__post_init__()

    @property
    def sizes_checked(self) -> dict[str, int]:
        _, k, v = self.state_sizes
        return {"head_k_dim": k, "head_v_dim": v}

    @property
    def state_sizes(self) -> tuple[int, int, int]:
        k = self.d_model // self.num_v_heads if self.head_k_dim is None else self.head_k_dim
        return self.num_v_heads, k, k if self.head_v_dim is None else self.head_v_dim

    @property
    def key_heads(self) -> int:
        return self.num_v_heads if self.num_k_heads is None else self.num_k_heads

    @property
    def recurrent_projections(self) -> dict[str, Shape]:
        return {"a": ((self.num_v_heads,), ("heads",)), "b": ((self.num_v_heads,), ("heads",))}

    @property
    def gate_projections(self) -> dict[str, Shape]:
        h, _, v = self.state_sizes
        return {"g": ((h, v), ("heads", "head"))}

    @property
    def chunk_flops(self) -> int:
        return chunk_flops(self.chunk_size, *self.state_sizes[1:], scalar=True, bounded=False)

    @property
    def inner_weights(self) -> tuple[int, int]:
        return 0, 0

    @property
    def vectors(self) -> int:
        h, _, v = self.state_sizes
        return 2 * h + v

    def decays(self, parts: Mapping[str, Array]) -> tuple[Array, Array]:
        h = self.num_v_heads
        scale = jnp.exp(param(self, "A_log", LogUniform(0.01, 16.0), (h,), ("heads",)).astype(jnp.float32))
        bias = param(self, "dt_bias", TimeStep(), (h,), ("heads",)).astype(jnp.float32)
        g = -scale * jax.nn.softplus(parts["a"].astype(jnp.float32) + bias)
        return g, self._beta(parts["b"])

    def gated_norm(self, out: Array, parts: Mapping[str, Array]) -> Array:
        norm = GatedRMSNorm(
            eps=self.norm_eps, gate="silu", round_first=True, param_dtype=self.param_dtype, name="o_norm"
        )
        return norm(out, parts["g"])
