"""Mixture of experts: a feed-forward layer of many small gated layers, of which each token uses a few.

    y = sum_{e chosen by the router} p_e E_e(x) + Shared(x),      E_e(x) = glu(x G_e, x U_e) D_e

Shazeer et al. 2017, arXiv 1701.06538; fine-grained and shared experts: DeepSeekMoE, arXiv 2401.06066. Compute follows `top_k`, memory
follows `num_experts`.
"""

from collections.abc import Callable, Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array

from jaxllm.errors import UserError
from jaxllm.layers.balance import sequence_loss, switch_loss, z_loss
from jaxllm.layers.base import RESIDUAL_SCALE, Aux, Constant, Context, Cost, Layer, fan_in, matrices_as, param
from jaxllm.layers.mlp import MLP
from jaxllm.layers.norm import RMSNorm
from jaxllm.layers.router import Router, Routing, SoftmaxRouter
from jaxllm.mesh import shard
from jaxllm.ops.dispatch import check_dispatch, dispatch
from jaxllm.ops.experts import Experts, Unit
from jaxllm.ops.glu import check_glu
from jaxllm.ops.linear import linear
from jaxllm.ops.queues import count


class MoE(Layer, kw_only=True):
    """`[b t d] -> [b t d]`. num_experts, top_k, d_expert: E experts of hidden width d_expert, k of them a token.

    router: one of `jaxllm.layers.router`, as a partial. glu, glu_limit: the gated unit inside experts and shared expert
    (`jaxllm.ops.glu`). expert_bias: biases on the experts' three products (gpt-oss).

    shared_experts: an expert that every token uses, of width shared_experts * d_expert, or d_shared; 0 = none. shared_gate: it is
    multiplied by `sigmoid(x w)` (Qwen3-Next).

    latent_dim: experts live in a narrower space: `y = RMSNorm(sum p_e E_e(x A)) B` with A `[d z]`, B `[z d]` (Kimi K3); the router
    and the shared expert see x.

    dispatch: how tokens reach experts (`jaxllm.ops.dispatch`). capacity_factor: room, in even shares, of an expert (capacity) or for
    what a device sends to another one (expert_parallel); null = drop nothing. exchange: how rows travel, `padded` or `ragged`.

    switch_loss, sequence_loss, z_loss: coefficients of the losses of `jaxllm.layers.balance`; 0 = none.

    Reports: `metric/load [e]` (times an even share), `metric/load_max`, `metric/entropy` of the scores (nats), `metric/dropped` (share
    of choices, where there is a capacity_factor); `capture/experts`, `capture/weights [b t k]` when "routing" is asked for.
    """

    num_experts: int
    top_k: int
    d_expert: int
    router: Callable[..., Router] = SoftmaxRouter
    glu: str = "swiglu"
    glu_limit: float | None = None
    expert_bias: bool = False
    shared_experts: int = 0
    d_shared: int | None = None
    shared_gate: bool = False
    latent_dim: int | None = None
    dispatch: str = "auto"
    capacity_factor: float | None = None
    exchange: str = "padded"
    switch_loss: float = 0.0
    sequence_loss: float = 0.0
    z_loss: float = 0.0

    def __post_init__(self) -> None:
        for name in ("num_experts", "top_k", "d_expert"):
            if getattr(self, name) < 1:
                raise UserError(f"{name}: {getattr(self, name)} must be at least 1")
        if self.top_k > self.num_experts:
            raise UserError(f"top_k: {self.top_k} is more than num_experts={self.num_experts}; lower it")
        for name in ("d_shared", "latent_dim"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise UserError(f"{name}: {getattr(self, name)} must be at least 1, or null")
        if self.shared_experts < 0:
            raise UserError(f"shared_experts: {self.shared_experts} must be at least 0")
        for name, wrong in (("shared_gate", self.shared_gate), ("d_shared", self.d_shared is not None)):
            if wrong and not self.shared_experts:
                raise UserError(
                    f"{name}: {getattr(self, name)} means nothing without shared_experts; set it to 1 or more"
                )
        if self.shared_experts and self.glu == "gpt_oss":
            raise UserError("glu: gpt_oss has no shared expert; set shared_experts=0")
        check_glu("glu", self.glu, self.glu_limit)
        check_dispatch(self.dispatch, self.capacity_factor, self.exchange)
        for name in ("switch_loss", "sequence_loss", "z_loss"):
            if getattr(self, name) < 0:
                raise UserError(f"{name}: {getattr(self, name)} must be at least 0")
        super().__post_init__()
        self.router_layer()  # checks its own fields against ours

    # ---- what the fields mean ------------------------------------------------------------------------------------

    @nn.nowrap
    def router_layer(self, **kwargs: Any) -> Router:
        """The router with the layer's fields filled in; unbound unless `name` is given."""
        try:
            return self.router(
                num_experts=self.num_experts,
                top_k=self.top_k,
                d_model=self.d_model,
                dtype=self.dtype,
                param_dtype=self.param_dtype,
                **({"parent": None} | kwargs if "name" not in kwargs else kwargs),
            )
        except UserError as error:
            raise UserError(f"router.{error}") from error

    @nn.nowrap
    def _shared(self, **kwargs: Any) -> MLP:
        return MLP(
            d_model=self.d_model,
            d_ff=self.d_shared or self.shared_experts * self.d_expert,
            activation="situ" if self.glu == "situ" else "silu",
            limit=self.glu_limit if self.glu == "clamped" else None,
            dtype=self.dtype,
            param_dtype=self.param_dtype,
            **kwargs,
        )

    @property
    def token_ids(self) -> int | None:
        """Of the router that is a table of them."""
        return self.router_layer().token_ids

    @property
    def width(self) -> int:
        """What experts read and write."""
        return self.d_model if self.latent_dim is None else self.latent_dim

    # ---- the forward pass ----------------------------------------------------------------------------------------

    @nn.compact
    def __call__(self, x: Array, ctx: Context) -> tuple[Array, Aux]:
        d, z = self.d_model, self.latent_dim
        routing = self.router_layer(name="router")(x, ctx)
        valid = ctx.segments > 0
        experts = jnp.where(valid[..., None], routing.experts, self.num_experts)  # padding chooses nothing
        inner = x
        if z is not None:
            inner = linear(
                x, param(self, "latent_down_proj", fan_in(d), (d, z), ("embed", "latent")).astype(self.dtype)
            )
        y, dropped = dispatch(
            self.dispatch,
            inner,
            experts,
            routing.weights,
            self._experts(),
            Unit(self.glu, self.glu_limit),
            self.capacity_factor,
            self.exchange,
        )
        if z is not None:
            y = RMSNorm(eps=self.norm_eps, param_dtype=self.param_dtype, name="latent_norm")(y)
            up = param(self, "latent_up_proj", fan_in(z, RESIDUAL_SCALE), (z, d), ("latent", "embed"))
            y = linear(y, up.astype(self.dtype))
        if self.shared_experts:
            more, _ = self._shared(name="shared")(x, ctx)
            if self.shared_gate:
                gate = param(self, "shared_gate", fan_in(d), (d, 1), ("embed", None)).astype(self.dtype)
                more = more * jax.nn.sigmoid(linear(x, gate))
            y = y + more
        return shard(y, "batch", "length", "act_embed"), self._aux(routing, experts, dropped, ctx)

    @nn.nowrap
    def _experts(self) -> Experts:
        e, w, f = self.num_experts, self.width, self.d_expert
        inner = "embed" if self.latent_dim is None else "latent"

        def weight(name: str, shape: tuple[int, ...], axes: tuple[str, ...], init: Any) -> Array:
            return param(self, name, init, (e, *shape), ("expert", *axes)).astype(self.dtype)

        def bias(name: str, size: int, axis: str) -> Array | None:
            return weight(name, (size,), (axis,), Constant(0.0)) if self.expert_bias else None

        return Experts(
            gate=weight("gate_proj", (w, f), (inner, "mlp"), fan_in(w)),
            up=weight("up_proj", (w, f), (inner, "mlp"), fan_in(w)),
            down=weight("down_proj", (f, w), ("mlp", inner), fan_in(f, RESIDUAL_SCALE)),
            gate_bias=bias("gate_bias", f, "mlp"),
            up_bias=bias("up_bias", f, "mlp"),
            down_bias=bias("down_bias", w, inner),
        )

    @nn.nowrap
    def _aux(self, routing: Routing, experts: Array, dropped: Array, ctx: Context) -> Aux:
        """Nothing for a call with a cache: there is nobody to read it."""
        aux: Aux = {}
        if "routing" in ctx.capture:
            aux |= {"capture/experts": routing.experts, "capture/weights": routing.weights}
        if ctx.rows is not None:
            return aux
        valid = ctx.segments > 0
        counts = count(experts, self.num_experts)
        choices = jnp.maximum(jnp.sum(counts), 1.0)
        load = counts * (self.num_experts / choices)
        p = routing.scores / (jnp.sum(routing.scores, axis=-1, keepdims=True) + 1e-20)
        entropy = jnp.sum(jnp.where(valid, -jnp.sum(jax.scipy.special.xlogy(p, p), axis=-1), 0.0))
        aux["metric/load"] = load
        aux["metric/load_max"] = jnp.max(load)
        aux["metric/entropy"] = entropy / jnp.maximum(jnp.sum(valid), 1)
        if self.capacity_factor is not None:
            aux["metric/dropped"] = dropped / choices
        if self.switch_loss:
            aux["loss/switch"] = self.switch_loss * switch_loss(routing.scores, counts, valid)
        if self.sequence_loss:
            aux["loss/sequence"] = self.sequence_loss * sequence_loss(routing.scores, routing.experts, ctx.segments)
        if self.z_loss:
            aux["loss/router_z"] = self.z_loss * z_loss(routing.logits, valid)
        return aux | {f"state/router/{name}": statistic for name, statistic in routing.states.items()}

    # ---- unbound -------------------------------------------------------------------------------------------------

    @nn.nowrap
    def prepare(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """Matrices in the dtype they are multiplied in; the shared expert prepares itself."""
        params = matrices_as(params, self.dtype)
        if self.shared_experts:
            params["shared"] = self._shared(parent=None).prepare(params["shared"])
        return params

    @nn.nowrap
    def params_read(self, tokens: int) -> float:
        """Every expert that some token chooses: `1 - (1 - k / E)^n` of them under an even draw of k for each of n tokens."""
        cost = self.cost(1, 1, 1, self.dtype)
        missed = (1 - self.top_k / self.num_experts) ** tokens
        routed = (cost.params - cost.params_active) / (1 - self.top_k / self.num_experts) if missed else 0.0
        return cost.params - routed * missed

    @nn.nowrap
    def cost(self, batch: int, t: int, s: float, dtype: Any) -> Cost:
        """FLOPs and active parameters by the k experts a token uses, parameters held by all E. `2 b t (d e + 3 k w f)` and the shared
        expert's, w being d, or z with `4 b t d z` for the latents. Kept for the backward: rows, gate and up of k experts a token."""
        n, d, w, f, k = batch * t, self.d_model, self.width, self.d_expert, self.top_k
        size = jnp.dtype(dtype).itemsize
        held, used = self.router_layer().params()
        expert = 3 * w * f + ((2 * f + w) if self.expert_bias else 0)
        ends = 0 if self.latent_dim is None else 2 * d * w + w
        total = Cost(
            flops=2 * n * (d * self.num_experts + 3 * k * w * f + (2 * d * w if ends else 0)),
            params=held + self.num_experts * expert + ends,
            params_active=used + k * expert + ends,
            activation_bytes=n
            * (d * size + self.num_experts * 4 + k * (2 * f * size + 8) + (2 * w * size if ends else 0)),
            collective_bytes=n * w * size,
        )
        if self.shared_experts:
            total = total + self._shared(parent=None).cost(batch, t, s, dtype)
        if self.shared_gate:
            total = total + Cost(flops=2 * n * d, params=d, params_active=d)
        return total
