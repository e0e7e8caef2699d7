"""The gated delta rule: its recurrence on numbers worked out by hand, and every form of it against the recurrence."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.ops.delta_rule import chunk_naive, recurrent, still
from jaxllm.ops.delta_step import few_tokens


def inputs(seed=0, *, b=2, t=13, h=3, k=6, v=5, least=-2.0, scalar=False):
    """q, k, v, g, beta of normed keys and log-decays down to `least`, in numpy."""
    rng = np.random.default_rng(seed)
    key = rng.standard_normal((b, t, h, k))
    key /= np.linalg.norm(key, axis=-1, keepdims=True)
    g = least * rng.uniform(0, 1, (b, t, h) if scalar else (b, t, h, k)) ** 2
    parts = (
        rng.standard_normal((b, t, h, k)) * k**-0.5,
        key,
        rng.standard_normal((b, t, h, v)),
        g,
        rng.uniform(0, 1, (b, t, h)),
    )
    return tuple(x.astype(np.float32) for x in parts)


def oracle(q, k, v, g, beta, first=None, state=None):
    """The recurrence in float64, one token, row and head after the other; states after every token `[t+1]` too."""
    b, t, h, width = k.shape
    g = np.broadcast_to(g if g.ndim == 4 else g[..., None], k.shape).astype(np.float64)
    out, states = np.zeros((b, t, h, v.shape[-1])), np.zeros((t + 1, b, h, width, v.shape[-1]))
    for row in range(b):
        for head in range(h):
            s = np.zeros((width, v.shape[-1])) if state is None else np.array(state[row, head], np.float64)
            states[0, row, head] = s
            for i in range(t):
                s = np.zeros_like(s) if first is not None and first[row, i] else s
                s = np.exp(g[row, i, head])[:, None] * s
                s = s + beta[row, i, head] * np.outer(k[row, i, head], v[row, i, head] - s.T @ k[row, i, head])
                out[row, i, head], states[i + 1, row, head] = s.T @ q[row, i, head], s
    return out, states


def test_decay_comes_before_the_prediction_and_the_output_after_the_write():
    k = jnp.array([[[[1.0, 0.0]], [[0.6, 0.8]]]])
    v = jnp.array([[[[2.0, 3.0]], [[1.0, -1.0]]]])
    g, beta = jnp.log(jnp.array([[[[0.9, 0.5]], [[0.9, 0.5]]]])), jnp.array([[[0.5], [0.25]]])
    for form in (recurrent, chunk_naive):
        out, state = form(jnp.ones_like(k), k, v, g, beta)
        np.testing.assert_allclose(state[0, 0], [[0.969, 1.0785], [0.092, -0.362]], atol=1e-6)
        np.testing.assert_allclose(out[0, 1, 0], [1.061, 0.7165], atol=1e-6)


@pytest.mark.parametrize("scalar", [False, True], ids=["channel", "head"])
def test_forms_agree_with_a_recurrence_in_float64(scalar):
    parts = inputs(scalar=scalar)
    first = np.zeros((2, 13), bool)
    first[0, [4, 5, 11]] = True
    state = np.random.default_rng(1).standard_normal((2, 3, 6, 5)).astype(np.float32)
    want, states = oracle(*parts, first, state)
    for form in (recurrent, *(lambda *a, c=c: chunk_naive(*a, chunk=c) for c in range(1, 6))):
        out, end = form(*parts, first, state)
        np.testing.assert_allclose(out, want, atol=2e-6)
        np.testing.assert_allclose(end, states[-1], atol=2e-6)


def test_few_tokens_give_all_outputs_and_the_state_at_the_commit_point():
    parts = inputs(t=7, b=3)
    state = np.random.default_rng(1).standard_normal((3, 3, 6, 5)).astype(np.float32)
    want, states = oracle(*parts, state=state * np.array([1, 1, 0])[:, None, None, None])
    commit, fresh = np.array([0, 4, 7]), np.array([False, False, True])
    out, end = jax.jit(few_tokens)(*parts, state, commit, fresh)
    np.testing.assert_allclose(out, want, atol=2e-6)
    np.testing.assert_allclose(end, states[commit, np.arange(3)], atol=2e-6)
    out, end = jax.jit(few_tokens)(*(x[:, :1] for x in parts), state, np.ones(3, int), fresh)
    np.testing.assert_allclose(out, want[:, :1], atol=2e-6)
    np.testing.assert_allclose(end, states[1], atol=2e-6)


def test_padding_leaves_no_trace():
    parts = inputs()
    valid = np.arange(13)[None] < np.array([[13], [6]])
    g, beta = still(*parts[3:], jnp.asarray(valid))
    _, states = oracle(*parts)
    for form in (recurrent, chunk_naive):
        _, end = form(*parts[:3], g, beta)
        np.testing.assert_allclose(end, states[[13, 6], [0, 1]], atol=2e-6)


def test_no_write_leaves_only_decay():
    parts = inputs()
    state = np.random.default_rng(1).standard_normal((2, 3, 6, 5)).astype(np.float32)
    for form in (recurrent, chunk_naive):
        _, end = form(*parts[:4], np.zeros_like(parts[4]), state=state)
        np.testing.assert_allclose(end, np.exp(parts[3].sum(1))[..., None] * state, atol=1e-6)


def test_without_decay_orthonormal_keys_are_an_exact_store():
    keys = np.eye(6, dtype=np.float32)[None, :, None]
    values = np.random.default_rng(0).standard_normal((1, 6, 1, 5)).astype(np.float32)
    again = np.concatenate([values, 2 * values], axis=1)  # written over: the second write replaces the first
    for form in (recurrent, chunk_naive):
        twice = np.concatenate([keys, keys], axis=1)
        out, state = form(twice, twice, again, np.zeros((1, 12, 1, 6), np.float32), np.ones((1, 12, 1), np.float32))
        np.testing.assert_allclose(state[0, 0], 2 * values[0, :, 0], atol=1e-6)
        np.testing.assert_allclose(out, again, atol=1e-6)
