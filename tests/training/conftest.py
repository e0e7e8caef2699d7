"""A model small enough to compile and train in a blink, and ragged batches for it."""

import functools
import types

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.layers.base import Constant as Fill
from jaxllm.layers.base import Cost, Layer, fan_in, param
from jaxllm.layers.gqa import GQA
from jaxllm.layers.mlp import MLP
from jaxllm.layers.moe import MoE
from jaxllm.layers.router import SigmoidRouter
from jaxllm.model import LanguageModel
from jaxllm.training.feed import place
from jaxllm.training.objectives import NextToken
from jaxllm.training.optimisers import AdamW
from jaxllm.training.schedules import Constant
from jaxllm.training.state import new_state
from jaxllm.training.step import make_train_step


class Past(Layer, kw_only=True):
    """A mixer of one matrix: the running mean of the row so far (over documents too), projected."""

    @nn.compact
    def __call__(self, x, ctx, cache=None, shared=None):
        count = jnp.arange(1, x.shape[1] + 1, dtype=x.dtype)[:, None]
        w = param(self, "proj", fan_in(self.d_model), (self.d_model, self.d_model), ("embed", None))
        return (jnp.cumsum(x, axis=1) / count) @ w.astype(x.dtype), cache, {} if shared is None else shared, {}

    @nn.nowrap
    def cost(self, batch, t, s, dtype):
        return Cost(flops=2 * batch * t * self.d_model**2)


class Counted(Layer, kw_only=True):
    """An ffn of one matrix with a loss, a statistic, and a parameter that only the statistic moves."""

    @nn.compact
    def __call__(self, x, ctx):
        def step(bias, counts):
            return bias + 0.01 * jnp.sign(counts[0] - counts[1:])

        valid = (ctx.segments > 0).astype(jnp.float32)
        bias = param(self, "bias", Fill(0.0), (2,), ("norm",), trainable=False, update=step)
        w = param(self, "up", fan_in(self.d_model), (self.d_model, self.d_model), ("embed", None))
        y = jnp.tanh(x @ w.astype(x.dtype)) + 0.0 * jnp.sum(bias).astype(x.dtype)
        even = jnp.sum(valid * (ctx.tokens % 2 == 0))
        return y, {
            "loss/balance": 0.1 * jnp.sum(valid[..., None] * jnp.square(y.astype(jnp.float32))),
            "state/bias": jnp.stack([even, jnp.sum(valid) - even, even]),
            "metric/load": even / jnp.sum(valid),
        }

    @nn.nowrap
    def cost(self, batch, t, s, dtype):
        return Cost(flops=2 * batch * t * self.d_model**2)


def make_model(mixer="past", ffn="counted", layers="2* global/dense", **fields):
    mixers = {"past": Past, "gqa": functools.partial(GQA, num_heads=4, num_kv_heads=2)}
    router = functools.partial(SigmoidRouter, bias_rate=0.01)
    experts = functools.partial(MoE, num_experts=4, top_k=2, d_expert=16, router=router, switch_loss=0.1, z_loss=0.01)
    ffns = {"counted": Counted, "mlp": functools.partial(MLP, d_ff=32), "moe": experts}
    defaults = {"vocab_size": 31, "vocab_multiple": 4, "d_model": 16, "dtype": "float32"}
    return LanguageModel(
        **{**defaults, **fields}, layers=layers, mixers={"global": mixers[mixer]}, ffns={"dense": ffns[ffn]}
    )


def make_batch(rows=4, length=12, vocab=31, seed=0):
    """Rows of one or two documents and padding, each of another length: every micro-batch trains its own number of
    tokens."""
    rng = np.random.default_rng(seed)
    batch = {name: np.zeros((rows, length), np.int32) for name in ("tokens", "labels", "positions", "segments")}
    batch["weights"] = np.zeros((rows, length), np.float32)
    for r in range(rows):
        at, segment = 0, 1
        for size in (int(rng.integers(2, length // 2 + 1)), int(rng.integers(0, length // 2 + 1))):
            ids = rng.integers(0, vocab, size + 1)
            where = slice(at, at + size)
            batch["tokens"][r, where], batch["labels"][r, where] = ids[:-1], ids[1:]
            batch["positions"][r, where], batch["segments"][r, where] = np.arange(size), segment
            batch["weights"][r, where] = 1.0
            at, segment = at + size, segment + 1
    return batch


OBJECTIVES = {"next_token": NextToken(chunk=24)}
_steps, _states = {}, {}


def make_optimiser(**fields):
    return AdamW(**{"lr": 1e-2, "schedule": Constant(), **fields})


def run(model, batches, objectives=None, optimiser=None, state=None, total_updates=10, **options):
    """The state after some steps, and their metrics. Equal steps are compiled once for all tests."""
    optimiser, objectives = optimiser or make_optimiser(), objectives or OBJECTIVES
    key = repr((model, objectives, optimiser, options))
    if key not in _steps:
        _steps[key] = jax.jit(make_train_step(model, objectives, optimiser, **options))
    if state is None:
        fresh = repr((model, optimiser))
        state = _states[fresh] = _states.get(fresh) or new_state(model, optimiser, 0)
    metrics = []
    for batch in batches:
        state, m = _steps[key](state, place(batch), np.int32(total_updates))
        metrics.append(jax.device_get(m))
    return state, metrics


def same(a, b):
    """Equal to the last bit."""
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))


@pytest.fixture(scope="session")
def tiny():
    return types.SimpleNamespace(
        model=make_model, batch=make_batch, optimiser=make_optimiser, objectives=OBJECTIVES, run=run, same=same
    )
