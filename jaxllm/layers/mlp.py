"""The dense feed-forward layer: SwiGLU, GeGLU or a plain MLP, by setting."""

from collections.abc import Callable, Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array

from jaxllm.errors import UserError
from jaxllm.layers.base import RESIDUAL_SCALE, Aux, Constant, Context, Cost, Layer, fan_in, matrices_as, param
from jaxllm.mesh import shard
from jaxllm.ops.glu import check_glu, glu
from jaxllm.ops.linear import linear, swiglu

ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "silu": jax.nn.silu,
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True),
    "relu": jax.nn.relu,
    "relu2": lambda x: jnp.square(jax.nn.relu(x)),  # So et al. 2021 (Primer), arXiv 2109.08668
}


class MLP(Layer, kw_only=True):
    """`y = (act(x G) * (x U)) D` when gated (Shazeer 2020, arXiv 2002.05202), else `y = act(x U) D`.

    d_ff: hidden width; default 8/3 d_model gated and 4 d_model ungated, rounded up to a multiple of 64. `[b t d] -> [b t d]`.
    activation: one of `ACTIVATIONS`, or `situ`: the bounded gated unit of Kimi K3. limit: clamps what a gated silu multiplies
    (DeepSeek-V4: 10). Both formulas are in `jaxllm.ops.glu`.
    """

    d_ff: int | None = None
    activation: str = "silu"
    gated: bool = True
    bias: bool = False
    limit: float | None = None

    def __post_init__(self) -> None:
        if self.activation not in (*ACTIVATIONS, "situ"):
            raise UserError(f"activation: {self.activation!r} is not one of {', '.join(ACTIVATIONS)}, situ")
        if self.activation == "situ" and not self.gated:
            raise UserError("activation: situ is a gated unit; set gated=true")
        if self.limit is not None and not (self.gated and self.activation == "silu"):
            raise UserError(
                f"limit: {self.limit} clamps a gated silu, here is activation={self.activation}; drop the limit"
            )
        check_glu("limit", self._glu, self.limit)
        if self.d_ff is not None and self.d_ff < 1:
            raise UserError(f"d_ff: {self.d_ff} must be at least 1")
        super().__post_init__()

    @property
    def width(self) -> int:
        if self.d_ff is not None:
            return self.d_ff
        return -(-(self.d_model * 8 // 3 if self.gated else 4 * self.d_model) // 64) * 64

    @property
    def _glu(self) -> str:
        """Which of `jaxllm.ops.glu.GLUS`; other activations have no form of their own there."""
        return "situ" if self.activation == "situ" else "swiglu" if self.limit is None else "clamped"

    def _gate(self, gate: Array, up: Array) -> Array:
        if self._glu != "swiglu":
            return glu(gate, up, self._glu, self.limit)
        return swiglu(gate, up) if self.activation == "silu" else ACTIVATIONS[self.activation](gate) * up

    @nn.compact
    def __call__(self, x: Array, ctx: Context) -> tuple[Array, Aux]:
        del ctx
        d, f = self.d_model, self.width

        def project(name: str, x: Array, shape: tuple[int, int], axes: tuple[str, str], scale: float = 1.0) -> Array:
            y = linear(x, param(self, name, fan_in(shape[0], scale), shape, axes).astype(self.dtype))
            if self.bias:
                y = y + param(self, name.replace("proj", "bias"), Constant(0.0), shape[1:], axes[1:]).astype(self.dtype)
            return y

        if self.has_variable("params", "gate_up_proj"):  # made by `prepare`: one matmul reads both
            both = linear(x, self.get_variable("params", "gate_up_proj").astype(self.dtype))
            gate, up = jnp.split(both, 2, axis=-1)
            hidden = self._gate(gate, up)
        elif self.gated:
            gate = shard(project("gate_proj", x, (d, f), ("embed", "mlp")), "batch", "length", "act_mlp")
            up = shard(project("up_proj", x, (d, f), ("embed", "mlp")), "batch", "length", "act_mlp")
            hidden = self._gate(gate, up)
        else:
            act = ACTIVATIONS[self.activation]
            hidden = act(shard(project("up_proj", x, (d, f), ("embed", "mlp")), "batch", "length", "act_mlp"))
        return project("down_proj", hidden, (f, d), ("mlp", "embed"), RESIDUAL_SCALE), {}

    @nn.nowrap
    def prepare(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """Fuse gate and up into one matrix."""
        params = matrices_as(params, self.dtype)
        if not self.gated or self.bias:
            return params
        rest = {name: value for name, value in params.items() if name not in ("gate_proj", "up_proj")}
        return {"gate_up_proj": jnp.concatenate([params["gate_proj"], params["up_proj"]], axis=-1), **rest}

    @nn.nowrap
    def cost(self, batch: int, t: int, s: float, dtype: Any) -> Cost:
        """FLOPs `2 b t (3|2) d f`; nothing is cached. Kept for the backward: the input and the hidden arrays."""
        del s
        d, f, matrices = self.d_model, self.width, 3 if self.gated else 2
        size = jnp.dtype(dtype).itemsize
        params = matrices * d * f + (((matrices - 1) * f + d) if self.bias else 0)
        return Cost(
            flops=2 * batch * t * matrices * d * f,
            params=params,
            params_active=params,
            activation_bytes=batch * t * (d + (3 if self.gated else 2) * f) * size,
            collective_bytes=batch * t * d * size,
        )
