"""Toy layers with true structure and toy mathematics: what the interfaces must carry, before the real layers exist.

A recurrent mixer (state, convolution window, replay of drafts), a pair that shares a value across layers, an ffn with a non-trainable
parameter and statistics, a residual scheme of two streams, and one whose finished blocks grow between groups.
"""

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import struct
from jax import Array

from jaxllm.cache import keep_pending, replay
from jaxllm.layers.base import Aux, Constant, Context, Cost, Layer, Normal, fan_in, param
from jaxllm.layers.residual import Residual
from jaxllm.mesh import shard


@struct.dataclass
class RecurrentCache:
    state: Array  # [b d] at the commit point
    window: Array  # [b d]: the input before the commit point
    pending: Array  # [b draft d]: inputs of the tentative tokens


class ToyRecurrent(Layer, kw_only=True):
    """`h_t = a h_{t-1} + (x_t + x_{t-1} / 2) W`, `y = h V`: a decaying state behind a convolution of width 2."""

    def _run(self, x: Array, valid: Array, first: Array, state: Array, window: Array) -> tuple[Array, Array, Array]:
        """States and windows after every token: `[n+1, b, d]` each, entry 0 being the start; and outputs `[b n d]`."""
        d = self.d_model
        w = param(self, "in_proj", fan_in(d), (d, d), ("embed", "mlp")).astype(jnp.float32)
        v = param(self, "out_proj", fan_in(d), (d, d), ("mlp", "embed")).astype(jnp.float32)
        a = jax.nn.sigmoid(param(self, "decay", Normal(1.0), (d,), ("norm",)).astype(jnp.float32))

        def step(carry, inputs):
            h, before = carry
            x, ok, start = inputs
            h = jnp.where(start[:, None], 0.0, h)
            before = jnp.where(start[:, None], 0.0, before)
            new = a * h + (x + 0.5 * before) @ w
            h = jnp.where(ok[:, None], new, h)
            before = jnp.where(ok[:, None], x, before)
            return (h, before), (h, before)

        xs = (x.astype(jnp.float32).swapaxes(0, 1), valid.T, first.T)
        start = (state.astype(jnp.float32), window.astype(jnp.float32))
        _, (states, windows) = jax.lax.scan(step, start, xs)
        states = jnp.concatenate([start[0][None], states])
        windows = jnp.concatenate([start[1][None], windows])
        return states, windows, (states[1:] @ v).swapaxes(0, 1)

    @nn.compact
    def __call__(self, x, ctx: Context, cache=None, shared=None):
        b, t, d = x.shape
        shared = {} if shared is None else shared
        zeros = jnp.zeros((b, d), jnp.float32)
        if cache is None:
            seg = ctx.segments
            first = jnp.pad(seg[:, 1:] != seg[:, :-1], ((0, 0), (1, 0)), constant_values=True)
            _, _, y = self._run(x, seg > 0, first, zeros, zeros)
            return y.astype(x.dtype), None, shared, {}
        rows = ctx.rows
        run = replay(cache.pending, x, rows.accepted, rows.new, rows.tentative)
        fresh = (rows.lengths == 0)[:, None]
        states, windows, y = self._run(
            run.inputs,
            run.valid,
            jnp.zeros_like(run.valid),
            jnp.where(fresh, 0.0, cache.state),
            jnp.where(fresh, 0.0, cache.window),
        )

        def pick(a):
            return jnp.take_along_axis(a, run.commit[None, :, None], axis=0)[0]

        y = jnp.take_along_axis(y, run.output[:, :, None], axis=1)
        new = RecurrentCache(pick(states), pick(windows), keep_pending(run, cache.pending.shape[1]))
        return y.astype(x.dtype), new, shared, {}

    def init_cache(self, batch, length, dtype, *, draft=0):
        del length
        zeros = jnp.zeros((batch, self.d_model), jnp.float32)
        return RecurrentCache(zeros, zeros, jnp.zeros((batch, draft, self.d_model), dtype))

    def cost(self, batch, t, s, dtype):
        del s
        d = self.d_model
        params = 2 * d * d + d
        return Cost(flops=4 * batch * t * d * d, params=params, params_active=params, cache_constant=2 * d * 4)


class ToyShare(Layer, kw_only=True):
    """`owner=True` publishes `x W` for later layers; others read the last published value."""

    owner: bool = True
    width: int = 8

    def shared_spec(self, b, t, train, dtype):
        return {"toy": jax.ShapeDtypeStruct((b, t, self.width), dtype)}

    @nn.compact
    def __call__(self, x, ctx: Context, cache=None, shared=None):
        shared = dict(shared or {})
        if self.owner:
            shared["toy"] = x @ param(
                self, "in_proj", fan_in(self.d_model), (self.d_model, self.width), ("embed", None)
            ).astype(x.dtype)
        y = jnp.tanh(shared["toy"]) @ param(
            self, "out_proj", fan_in(self.width), (self.width, self.d_model), (None, "embed")
        ).astype(x.dtype)
        return y * x, cache, shared, {}

    def init_cache(self, batch, length, dtype, *, draft=0):
        del batch, length, dtype, draft
        return ()

    def cost(self, batch, t, s, dtype):
        params = self.d_model * self.width * (2 if self.owner else 1)
        return Cost(flops=2 * batch * t * params, params=params, params_active=params)


@dataclasses.dataclass(frozen=True)
class SignStep:
    """Frozen, so that two declarations compare equal: their static fields are part of what a jit is keyed by."""

    size: float = 0.125

    def __call__(self, bias: Array, count: Array) -> Array:
        return bias + self.size * jnp.sign(count - jnp.mean(count, axis=-1, keepdims=True))


class ToyBiased(Layer, kw_only=True):
    """`y = x W + bias`, where `bias` is moved by a sign rule from token counts and never by the gradient."""

    @nn.compact
    def __call__(self, x, ctx: Context) -> tuple[Array, Aux]:
        d = self.d_model
        y = x @ param(self, "proj", fan_in(d, 0.3), (d, d), ("embed", "mlp")).astype(x.dtype)
        bias = param(self, "bias", Constant(0.0), (d,), ("norm",), trainable=False, update=SignStep())
        valid = (ctx.segments > 0)[..., None]
        on = ((y > 0) & valid).astype(jnp.float32)
        aux = {
            "loss/toy": jnp.sum(jnp.where(valid, y.astype(jnp.float32) ** 2, 0.0)),
            "metric/on": jnp.sum(on),
            "state/bias": jnp.sum(on, axis=(0, 1)),
        }
        return y + bias.astype(x.dtype), aux

    def cost(self, batch, t, s, dtype):
        params = self.d_model * (self.d_model + 1)
        return Cost(flops=2 * batch * t * self.d_model**2, params=params, params_active=params)


class TwoStreams(Residual, kw_only=True):
    """R is `[b t 2 d]`: a site reads a learned mix of both streams and writes into both with learned weights."""

    def setup(self) -> None:
        if self.site in ("mixer", "ffn"):
            self.mix_in = param(self, "mix_in", Normal(1.0), (2,), (None,))
            self.mix_out = param(self, "mix_out", Normal(1.0), (2,), (None,))

    def start(self, e):
        return jnp.stack([e, 0.5 * e], axis=2)

    def read(self, R):
        return jnp.einsum("btnd,n->btd", R, self.mix_in.astype(R.dtype))

    def write(self, R, y):
        return shard(R + y[:, :, None] * self.mix_out.astype(R.dtype)[:, None], "batch", "length", None, "act_embed")

    def finish(self, R):
        return jnp.mean(R, axis=2)


class GrowingBlocks(Residual, kw_only=True):
    """R is (finished blocks, running prefix). A site reads their mean; a boundary finishes a block: R changes its structure there."""

    def start(self, e):
        return ((e,), jnp.zeros_like(e))

    def read(self, R):
        done, prefix = R
        return (sum(done) + prefix) / (len(done) + 1)

    def write(self, R, y):
        return (R[0], shard(R[1] + y, "batch", "length", "act_embed"))

    def finish(self, R):
        return self.read(R)

    def split(self, R):
        return R[1], R[0]

    def merge(self, carry, fixed):
        return (fixed, carry)

    def boundary(self, R, layers):
        return ((*R[0], R[1]), jnp.zeros_like(R[1]))
