"""Gated units equal their formulas in numpy, bound what they promise to bound, and keep two arrays for the backward."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.errors import UserError
from jaxllm.ops.glu import GLUS, check_glu, glu


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def bounded(g, u, limit):
    return np.minimum(g, limit), np.clip(u, -limit, limit)


def formula(kind, g, u, limit):
    g, u = np.asarray(g, np.float64), np.asarray(u, np.float64)
    if limit is not None:
        g, u = bounded(g, u, limit)
    if kind == "gpt_oss":
        return g * sigmoid(1.702 * g) * (u + 1)
    if kind == "situ":
        return 4 * np.tanh(g / 4) * sigmoid(g) * 25 * np.tanh(u / 25)
    return g * sigmoid(g) * u


CASES = [("swiglu", None), ("clamped", 1.5), ("gpt_oss", 1.5), ("situ", None)]


@pytest.mark.parametrize("kind,limit", CASES)
def test_each_equals_its_formula_and_its_slope(kind, limit):
    g, u = 4 * jax.random.normal(jax.random.key(0), (2, 64))
    np.testing.assert_allclose(glu(g, u, kind, limit), formula(kind, g, u, limit), rtol=2e-5, atol=1e-5)
    got = jax.grad(lambda g, u: jnp.sum(jnp.sin(glu(g, u, kind, limit))), argnums=(0, 1))(g, u)
    for i, array in enumerate((g, u)):
        moved = [np.asarray(array, np.float64) + e for e in (-1e-6, 1e-6)]
        ends = [formula(kind, *((m, u) if i == 0 else (g, m)), limit) for m in moved]
        slope = (ends[1] - ends[0]) / 2e-6 * np.cos(formula(kind, g, u, limit))
        np.testing.assert_allclose(got[i], slope, rtol=1e-4, atol=1e-4)


def test_outputs_are_bounded_however_large_the_input():
    huge = jnp.array([-1e4, 1e4, 3e38])
    out = glu(huge[:, None], huge[None], "situ", None)
    assert np.abs(out).max() <= 100.0 and np.isfinite(out).all()
    assert np.abs(glu(huge[:, None], huge[None], "clamped", 10.0)).max() <= 100.0
    assert glu(jnp.ones(2, jnp.bfloat16), jnp.ones(2, jnp.bfloat16), "situ").dtype == jnp.bfloat16


@pytest.mark.parametrize("kind,limit", CASES)
def test_the_backward_keeps_gate_and_up_alone(kind, limit):
    x = jnp.ones((8, 64))
    kept = jax.tree.leaves(jax.vjp(lambda g, u: glu(g, u, kind, limit), x, 2 * x)[1])
    assert sum(a.size for a in kept) == 2 * x.size


@pytest.mark.parametrize("kind,limit", [("silly", None), ("clamped", None), ("gpt_oss", -1.0), ("situ", 3.0)])
def test_a_wrong_kind_or_limit_is_one_line(kind, limit):
    with pytest.raises(UserError, match="^glu: "):
        check_glu("glu", kind, limit)
    assert set(GLUS) == {kind for kind, _ in CASES}
