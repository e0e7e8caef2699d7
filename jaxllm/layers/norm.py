"""Normalisation layers. Statistics are fp32 whatever the input; the output has the input's dtype."""

from collections.abc import Callable
from typing import Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array

from jaxllm.layers.base import Constant, param
from jaxllm.ops.linear import rms


class RMSNorm(nn.Module, kw_only=True):
    """`y = x / sqrt(mean(x^2) + eps) * w` (Zhang and Sennrich 2019, arXiv 1910.07467), over the last axis.

    Variants, as checkpoints need them: `zero_centred` multiplies by (1 + w) with w starting at 0 (Gemma); `weightless` has no w;
    `round_first` rounds to the input's dtype before the weight (Llama, Qwen, DeepSeek), else after it (gpt-oss).
    """

    supplied: ClassVar[tuple[str, ...]] = ("eps",)  # by the model: its `norm_eps`

    eps: float = 1e-6
    zero_centred: bool = False
    weightless: bool = False
    round_first: bool = True
    param_dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x: Array) -> Array:
        u = rms(x, self.eps)
        if self.weightless:
            return u.astype(x.dtype)
        w = param(self, "scale", Constant(0.0 if self.zero_centred else 1.0), (x.shape[-1],), ("norm",)).astype(
            jnp.float32
        )
        if self.zero_centred:
            return (u * (1.0 + w)).astype(x.dtype)
        if self.round_first:
            return u.astype(x.dtype) * w.astype(x.dtype)
        return (u * w).astype(x.dtype)


GATES: dict[str, Callable[[Array], Array]] = {"sigmoid": jax.nn.sigmoid, "silu": jax.nn.silu}


class GatedRMSNorm(nn.Module, kw_only=True):
    """`y = x / sqrt(mean(x^2) + eps) * w * f(gate)` over the last axis, `f` fp32: how linear-attention layers norm each head's output.

    gate: sigmoid (KDA) or silu (Gated DeltaNet). `round_first`: to the input's dtype before the weight and after it (Qwen3-Next),
    else once, at the end (Kimi Linear).
    """

    supplied: ClassVar[tuple[str, ...]] = ("eps",)

    eps: float = 1e-6
    gate: str = "sigmoid"
    round_first: bool = False
    param_dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x: Array, gate: Array) -> Array:
        w = param(self, "scale", Constant(1.0), (x.shape[-1],), ("norm",))
        u = rms(x, self.eps)
        u = (
            (u.astype(x.dtype) * w.astype(x.dtype)).astype(jnp.float32)
            if self.round_first
            else u * w.astype(jnp.float32)
        )
        return (u * GATES[self.gate](gate.astype(jnp.float32))).astype(x.dtype)


class LayerNorm(nn.Module, kw_only=True):
    """`y = (x - mean) / sqrt(var + eps) * w + b` (Ba et al. 2016, arXiv 1607.06450), over the last axis; `bias=False` drops b."""

    supplied: ClassVar[tuple[str, ...]] = ("eps",)

    eps: float = 1e-5
    bias: bool = True
    param_dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x: Array) -> Array:
        u = x.astype(jnp.float32)
        u = u - jnp.mean(u, axis=-1, keepdims=True)
        u = u * jax.lax.rsqrt(jnp.mean(u * u, axis=-1, keepdims=True) + self.eps)
        u = u * param(self, "scale", Constant(1.0), (x.shape[-1],), ("norm",)).astype(jnp.float32)
        if self.bias:
            u = u + param(self, "bias", Constant(0.0), (x.shape[-1],), ("norm",)).astype(jnp.float32)
        return u.astype(x.dtype)
