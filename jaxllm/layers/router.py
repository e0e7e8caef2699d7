"""Routers: which experts a token goes to, and with what weight. One class each, one interface.

    routing = router(x [b t d], ctx)      experts int32 [b t k], weights fp32 [b t k], scores fp32 [b t e], logits fp32 [b t e]

`z = x W` are the logits, `s` the scores. The choice is discrete; gradients reach W through the weights of what was chosen.

| router | chosen by | weights | where |
| --- | --- | --- | --- |
| SoftmaxRouter | `s = softmax(z)`, in groups by their best score | s, or s / sum s | Switch, Mixtral, Qwen3-MoE, DeepSeek-V2 |
| TopKSoftmaxRouter | z | softmax over the chosen z | gpt-oss |
| SigmoidRouter | `s = sigmoid(z)` plus a bias, in groups by their two best | s / (sum s + 1e-20) | DeepSeek-V3, GLM, Kimi, MiMo |
| SqrtSoftplusRouter | `s = sqrt(softplus(z))` plus a bias | as SigmoidRouter | DeepSeek-V4 |
| HashRouter | a fixed table of the token id | as SqrtSoftplusRouter | DeepSeek-V4, first layers; Roller et al. 2021, arXiv 2106.04426 |

A bias takes part in the choice alone, never in the weights (Wang et al. 2024, arXiv 2408.15664). It has no gradient: one rule moves it
once per optimiser step from the statistics of all tokens of that step (`jaxllm.layers.balance`).
"""

import dataclasses
import functools
from typing import Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import Array, lax

from jaxllm.errors import UserError
from jaxllm.layers.balance import QuantileStep, SignStep, quantile_histogram
from jaxllm.layers.base import Constant, Context, fan_in, param
from jaxllm.ops.queues import count

ROUTER_DTYPES = ("float32", "compute")
BALANCES = ("sign", "quantile")


@struct.dataclass
class Routing:
    """experts: int32 `[b t k]`; weights: fp32 `[b t k]`; scores, logits: fp32 `[b t e]`. states: statistics for the router's
    parameters, by name. Padding is routed like any token here; whoever uses the routing masks it."""

    experts: Array
    weights: Array
    scores: Array
    logits: Array
    states: dict[str, Array] = struct.field(default_factory=dict)


@jax.custom_vjp
def pick(scores: Array, experts: Array) -> Array:
    """`scores [.. e], experts [.. k] -> [.. k]`. Its gradient compares instead of scattering, which CPUs do one by one."""
    return jnp.take_along_axis(scores, experts, axis=-1)


def _pick_backward(saved: tuple[Array, Array], dy: Array) -> tuple[Array, np.ndarray]:
    template, experts = saved
    e = template.shape[0]
    hit = experts[..., None] == jnp.arange(e, dtype=experts.dtype)
    return jnp.sum(jnp.where(hit, dy[..., None], 0), axis=-2), np.zeros(experts.shape, jax.dtypes.float0)


pick.defvjp(lambda s, e: (pick(s, e), (jnp.zeros(s.shape[-1:], jnp.bool_), e)), _pick_backward)


def softmax(z: Array) -> Array:
    """Over the last axis in fp32; a row of nothing but -inf gives zeros, and zero gradients."""
    z = z.astype(jnp.float32)
    top = lax.stop_gradient(jnp.max(z, axis=-1, keepdims=True))
    e = jnp.exp(z - jnp.where(jnp.isfinite(top), top, 0.0))
    total = jnp.sum(e, axis=-1, keepdims=True)
    return e / jnp.where(total > 0, total, 1.0)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def normalise(w: Array, eps: float) -> Array:
    """`w / (sum w + eps)` over the last axis, `w >= 0`; zeros where that is 0 / 0.

    With `y` the result, `dw = (dy - sum y dy) / total`: the square of a tiny total, which autodiff writes, would be 0.
    """
    return w / _total(w, eps)


def _total(w: Array, eps: float) -> Array:
    total = jnp.sum(w, axis=-1, keepdims=True) + eps
    return jnp.where(total > 0, total, 1.0)


def _normalise_forward(w: Array, eps: float) -> tuple[Array, tuple[Array, Array]]:
    total = _total(w, eps)
    return w / total, (w / total, total)


def _normalise_backward(eps: float, saved: tuple[Array, Array], dy: Array) -> tuple[Array]:
    del eps
    y, total = saved
    return ((dy - jnp.sum(y * dy, axis=-1, keepdims=True)) / total,)


normalise.defvjp(_normalise_forward, _normalise_backward)


def sqrt_softplus(z: Array) -> Array:
    """`sqrt(log(1 + e^z))`; far to the left `e^(z/2)`, whose gradient is finite where that of the root is not."""
    near = z > -40.0
    return jnp.where(near, jnp.sqrt(jax.nn.softplus(jnp.where(near, z, 0.0))), jnp.exp(0.5 * z))


def limit_to_groups(choice: Array, num_groups: int, top_groups: int, best: int) -> Array:
    """-inf for experts outside the `top_groups` groups of `choice [.. e]` whose `best` largest entries have the largest sum.

    -inf and not 0: with a bias, scores worth choosing may be negative.
    """
    groups = choice.reshape(*choice.shape[:-1], num_groups, -1)
    rank = jnp.sum(lax.top_k(groups, best)[0], axis=-1)
    kept = lax.top_k(rank, top_groups)[1]
    keep = jnp.any(kept[..., None] == jnp.arange(num_groups, dtype=kept.dtype), axis=-2)
    return jnp.where(keep[..., None], groups, -jnp.inf).reshape(choice.shape)


class Router(nn.Module, kw_only=True):
    """Base. router_dtype: `float32` (input and weights are upcast: DeepSeek, GLM, Kimi) or `compute`, the logits in the model's
    dtype (Mixtral, Qwen3, DeepSeek-V4, gpt-oss); everything after the logits is fp32."""

    supplied: ClassVar[tuple[str, ...]] = ("num_experts", "top_k")  # by the layer of experts

    num_experts: int
    top_k: int
    d_model: int
    dtype: Any = jnp.float32
    param_dtype: Any = jnp.float32
    router_dtype: str = "float32"

    groups: ClassVar[int] = 0  # best entries that rank a group; 0 = the router knows no groups

    def __post_init__(self) -> None:
        if self.router_dtype not in ROUTER_DTYPES:
            raise UserError(f"router_dtype: {self.router_dtype!r} is not one of {', '.join(ROUTER_DTYPES)}")
        if getattr(self, "scale", 1.0) <= 0:
            raise UserError(f"scale: {self.scale} must be > 0")
        if self.groups:
            self._check_groups()
        super().__post_init__()

    @nn.nowrap
    def _check_groups(self) -> None:
        n, top = self.num_groups, self.top_groups
        if (n is None) != (top is None):
            raise UserError(f"top_groups: {top} and num_groups: {n} go together; set both or neither")
        if n is None:
            return
        if n < 1 or self.num_experts % n or self.num_experts // n < self.groups:
            raise UserError(
                f"num_groups: {n} must divide num_experts={self.num_experts} into groups of at least {self.groups}"
            )
        if not 1 <= top <= n or top * (self.num_experts // n) < self.top_k:
            raise UserError(
                f"top_groups: {top} of {n} groups of {self.num_experts // n} experts cannot give top_k={self.top_k};"
                f" it must be 1 to {n} and hold enough experts"
            )

    @nn.nowrap
    def _limited(self, choice: Array) -> Array:
        """`choice` within the best groups."""
        if not self.groups or self.num_groups in (None, 1):
            return choice
        return limit_to_groups(choice, self.num_groups, self.top_groups, self.groups)

    @nn.nowrap
    def _logits(self, x: Array) -> Array:
        """fp32 `[b t e]`."""
        d, e = self.d_model, self.num_experts
        kernel = param(self, "kernel", fan_in(d), (d, e), ("embed", None))
        dtype = jnp.float32 if self.router_dtype == "float32" else self.dtype
        return jnp.einsum("btd,de->bte", x.astype(dtype), kernel.astype(dtype)).astype(jnp.float32)

    @nn.nowrap
    def _best(self, choice: Array) -> Array:
        """int32 `[b t k]`; of equal ones the first."""
        return lax.top_k(lax.stop_gradient(choice), self.top_k)[1].astype(jnp.int32)

    @property
    def token_ids(self) -> int | None:
        """Rows of a table of token ids, where the router has one."""
        return None

    @nn.nowrap
    def params(self) -> tuple[int, int]:
        """Parameters held, and used by one token."""
        return (self.d_model * self.num_experts,) * 2


class SoftmaxRouter(Router, kw_only=True):
    """`s = softmax(z)`; weights s of the k best, divided by their sum (renormalise), times scale.

    num_groups, top_groups: choose within the groups whose best score is largest (DeepSeek-V2). jitter: in training the router sees
    `x * U(1 - jitter, 1 + jitter)` (Switch, arXiv 2101.03961).
    """

    renormalise: bool = True
    scale: float = 1.0
    num_groups: int | None = None
    top_groups: int | None = None
    jitter: float = 0.0

    groups: ClassVar[int] = 1

    def __post_init__(self) -> None:
        if not 0 <= self.jitter < 1:
            raise UserError(f"jitter: {self.jitter} must be at least 0 and below 1")
        super().__post_init__()

    @nn.compact
    def __call__(self, x: Array, ctx: Context) -> Routing:
        if self.jitter and ctx.train:
            noise = jax.random.uniform(self.make_rng("dropout"), x.shape, x.dtype, 1 - self.jitter, 1 + self.jitter)
            x = x * noise
        z = self._logits(x)
        s = softmax(z)
        experts = self._best(self._limited(s))
        w = pick(s, experts)
        if self.renormalise:
            w = normalise(w, 0.0)
        return Routing(experts, w * self.scale, s, z)


class TopKSoftmaxRouter(Router, kw_only=True):
    """Weights are a softmax over the k largest logits (gpt-oss). logit_bias: a trained bias on the logits."""

    logit_bias: bool = False

    @nn.compact
    def __call__(self, x: Array, ctx: Context) -> Routing:
        del ctx
        z = self._logits(x)
        if self.logit_bias:
            z = z + param(self, "logit_bias", Constant(0.0), (self.num_experts,), (None,)).astype(jnp.float32)
        experts = self._best(z)
        return Routing(experts, softmax(pick(z, experts)), softmax(z), z)

    @nn.nowrap
    def params(self) -> tuple[int, int]:
        held = (self.d_model + int(self.logit_bias)) * self.num_experts
        return held, held


class _Biased(Router, kw_only=True):
    """What SigmoidRouter and SqrtSoftplusRouter share: scores of each expert by itself, and a bias on the choice.

    use_bias: with a bias. bias_rate: its step, under balance=sign. balance: the rule that moves it, `sign` or `quantile`; null leaves
    it as it is (a released model).
    """

    use_bias: bool = True
    renormalise: bool = True
    scale: float = 1.0
    bias_rate: float = 1e-3
    balance: str | None = "sign"

    balances: ClassVar[tuple[str, ...]] = BALANCES

    def __post_init__(self) -> None:
        if self.balance is not None and self.balance not in self.balances:
            raise UserError(f"balance: {self.balance!r} is not one of {', '.join(self.balances)}, null")
        if self.bias_rate < 0:
            raise UserError(f"bias_rate: {self.bias_rate} must be at least 0")
        super().__post_init__()

    @nn.nowrap
    def _weighted(self, s: Array, experts: Array) -> Array:
        w = pick(s, experts)
        if self.renormalise:
            w = normalise(w, 1e-20)
        return w * self.scale

    @nn.nowrap
    def _rule(self) -> Any:
        if self.balance == "sign":
            return SignStep(self.bias_rate)
        return QuantileStep(self.top_k / self.num_experts) if self.balance == "quantile" else None

    @nn.nowrap
    def _route(self, s: Array, z: Array, ctx: Context) -> Routing:
        if not self.use_bias:
            experts = self._best(self._limited(s))
            return Routing(experts, self._weighted(s, experts), s, z)
        bias = param(
            self, "bias", Constant(0.0), (self.num_experts,), (None,),
            dtype=jnp.float32, trainable=False, update=self._rule(),
        )  # fmt: skip
        choice = lax.stop_gradient(s) + bias.astype(jnp.float32)
        experts = self._best(self._limited(choice))
        states = {}
        if self.balance is not None and ctx.train:
            valid = ctx.segments > 0
            if self.balance == "sign":
                states["bias"] = count(jnp.where(valid[..., None], experts, self.num_experts), self.num_experts)
            else:
                states["bias"] = quantile_histogram(lax.stop_gradient(s), bias, valid, self.top_k)
        return Routing(experts, self._weighted(s, experts), s, z, states)

    @nn.nowrap
    def params(self) -> tuple[int, int]:
        held = (self.d_model + int(self.use_bias)) * self.num_experts
        return held, held


class SigmoidRouter(_Biased, kw_only=True):
    """`s = sigmoid(z)`, chosen by `s + bias`; weights `s / (sum s + 1e-20)` (renormalise) times scale, without the bias.

    num_groups, top_groups: choose within the groups whose two best biased scores have the largest sum (DeepSeek-V3, arXiv 2412.19437).
    """

    num_groups: int | None = None
    top_groups: int | None = None

    groups: ClassVar[int] = 2

    @nn.compact
    def __call__(self, x: Array, ctx: Context) -> Routing:
        z = self._logits(x)
        return self._route(jax.nn.sigmoid(z), z, ctx)


class SqrtSoftplusRouter(_Biased, kw_only=True):
    """`s = sqrt(softplus(z))`, otherwise as SigmoidRouter without groups (DeepSeek-V4)."""

    balances: ClassVar[tuple[str, ...]] = ("sign",)  # quantiles need bounded scores

    @nn.compact
    def __call__(self, x: Array, ctx: Context) -> Routing:
        z = self._logits(x)
        return self._route(sqrt_softplus(z), z, ctx)


@dataclasses.dataclass(frozen=True)
class HashTable:
    """Initialiser of `[vocab k]`: k different experts for each token id, each expert for equally many ids as near as can be."""

    num_experts: int

    def __call__(self, key: Array, shape: tuple[int, ...], dtype: Any) -> Array:
        first = jax.random.permutation(key, shape[0])[:, None]
        return ((first + self._strides(shape)) % self.num_experts).astype(dtype)

    def draw(self, rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
        return (rng.permutation(shape[0])[:, None] + self._strides(shape)) % self.num_experts

    def _strides(self, shape: tuple[int, ...]) -> np.ndarray:
        return np.arange(shape[1])[None] * max(1, self.num_experts // shape[1])


class HashRouter(Router, kw_only=True):
    """Experts from a fixed table of the token id, weights from the scores of a SqrtSoftplusRouter (DeepSeek-V4, layers 0-2).

    vocab_size: rows of the table. The model refuses a table with fewer rows than it has token ids (`Layer.token_ids`).
    """

    vocab_size: int
    renormalise: bool = True
    scale: float = 1.0

    def __post_init__(self) -> None:
        if self.vocab_size < 1:
            raise UserError(f"vocab_size: {self.vocab_size} must be at least 1: the number of token ids")
        super().__post_init__()

    @property
    def token_ids(self) -> int:
        return self.vocab_size

    @nn.compact
    def __call__(self, x: Array, ctx: Context) -> Routing:
        if ctx.tokens is None:
            raise UserError("router: a HashRouter routes by token ids, and this call has none; call with tokens")
        table = param(
            self, "table", HashTable(self.num_experts), (self.vocab_size, self.top_k), (None, None),
            dtype=jnp.int32, trainable=False,
        )  # fmt: skip
        z = self._logits(x)
        s = sqrt_softplus(z)
        experts = jnp.take(table[:, : self.top_k], ctx.tokens, axis=0, mode="clip")
        w = pick(s, experts)
        if self.renormalise:
            w = normalise(w, 1e-20)
        return Routing(experts, w * self.scale, s, z)

    @nn.nowrap
    def params(self) -> tuple[int, int]:
        active = self.d_model * self.num_experts
        return active + self.vocab_size * self.top_k, active + self.top_k
