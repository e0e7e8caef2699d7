"""The gated delta rule: its recurrence on numbers worked out by hand, and every form of it against the recurrence."""

import functools

import contract
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from elsewhere import TARGETS, lowered

from jaxllm.mesh import build_mesh, use_mesh
from jaxllm.ops import delta_chunk
from jaxllm.ops.delta import chunk_flops, delta_rule
from jaxllm.ops.delta_chunk import chunked, inverse
from jaxllm.ops.delta_pallas import chunk_matrices
from jaxllm.ops.delta_rule import chunk_naive, recurrent, still
from jaxllm.ops.delta_step import few_tokens

FORMS = [jax.jit(form) for form in (recurrent, chunk_naive, functools.partial(chunked, chunk=4))]


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
    for form in FORMS:
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
    for form in (recurrent, *(functools.partial(chunk_naive, chunk=c) for c in (1, 3, 5))):
        out, end = jax.jit(form)(*parts, first, state)
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
    for form in FORMS:
        _, end = form(*parts[:3], g, beta)
        np.testing.assert_allclose(end, states[[13, 6], [0, 1]], atol=2e-6)


def test_no_write_leaves_only_decay():
    parts = inputs()
    state = np.random.default_rng(1).standard_normal((2, 3, 6, 5)).astype(np.float32)
    for form in FORMS:
        _, end = form(*parts[:4], np.zeros_like(parts[4]), state=state)
        np.testing.assert_allclose(end, np.exp(parts[3].sum(1))[..., None] * state, atol=1e-6)


def test_without_decay_orthonormal_keys_are_an_exact_store():
    keys = np.eye(6, dtype=np.float32)[None, :, None]
    values = np.random.default_rng(0).standard_normal((1, 6, 1, 5)).astype(np.float32)
    again = np.concatenate([values, 2 * values], axis=1)  # written over: the second write replaces the first
    for form in FORMS:
        twice = np.concatenate([keys, keys], axis=1)
        out, state = form(twice, twice, again, np.zeros((1, 12, 1, 6), np.float32), np.ones((1, 12, 1), np.float32))
        np.testing.assert_allclose(state[0, 0], 2 * values[0, :, 0], atol=1e-6)
        np.testing.assert_allclose(out, again, atol=1e-6)


# ---- the fast chunked form ---------------------------------------------------------------------------------------

CASES = {  # chunk, tokens, least log-decay, one decay a head?, chunks worked on at once
    "C1": (1, 5, -2.0, False, 64),
    "C16-bounded": (16, 40, -5.0, False, 2),
    "C64": (64, 70, -2.0, False, 64),
    "C16-softplus": (16, 40, -300.0, False, 64),
    "C16-head": (16, 40, -30.0, True, 2),
}


@pytest.mark.parametrize("case", CASES)
def test_chunks_are_the_recurrence_with_every_gradient(case, monkeypatch):
    """Documents end inside chunks and at their edges; the state goes in and out; more than one block of chunks."""
    chunk, t, least, scalar, block = CASES[case]
    monkeypatch.setattr(delta_chunk, "BLOCK", block)
    rng = np.random.default_rng(2)
    parts = inputs(t=t, h=1, least=least, scalar=scalar)
    if least == -5.0:
        parts[3][:, 8:30] = -5.0  # the strongest decay there is, tile after tile
    first = np.zeros((2, t), bool)
    first[1, [0, 2, 3, min(16, t - 2), t - 1]] = True
    state = rng.standard_normal((2, 1, 6, 5)).astype(np.float32)
    weights = rng.standard_normal((2, t, 1, 5)).astype(np.float32), rng.standard_normal(state.shape).astype(np.float32)

    def run(form):
        def loss(parts, state):
            out, end = form(*parts, first, state)
            return jnp.sum(out * weights[0]) + jnp.sum(end * weights[1]), (out, end)

        return jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))(parts, state)

    fast = functools.partial(chunked, chunk=chunk, bounded=least >= -5.0)
    ((_, got), got_grads), ((_, want), want_grads) = run(fast), run(recurrent)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, atol=3e-6)
    for a, b in zip(jax.tree.leaves(got_grads), jax.tree.leaves(want_grads), strict=True):
        assert np.isfinite(a).all()
        np.testing.assert_allclose(a, b, atol=1e-5 * np.abs(b).max())


@pytest.mark.parametrize("bounded", [True, False])
@pytest.mark.parametrize(("platform", "target", "call"), TARGETS)
def test_the_kernel_lowers_for_machines_that_are_not_here(platform, target, call, bounded, monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: platform)
    wide, column = (jax.ShapeDtypeStruct((1, 2, 4, 32, n), jnp.float32) for n in (64, 1))

    def kernel(q, k, g, beta):
        return chunk_matrices(q, k, g, beta, None, bounded)

    assert call in lowered(kernel, platform, target, wide, wide, wide, column)


@pytest.mark.parametrize("case", ["C32-bounded", "C32-softplus", "C32-burst", "C8-head"])
def test_the_pallas_kernel_interpreted_is_the_recurrence(case):
    """Several tiles a chunk, documents that end inside tiles and at their edges; the gradient takes what the kernel made.

    Where decays reach e^-300 a token, a decay that is the difference of two sums of a tile would be wrong by 3e-5; in a burst of such
    tokens before light ones, so would one to the tile's end, which the next tile reads, by 1e-4.
    """
    chunk, kind = int(case[1:].split("-")[0]), case.split("-")[1]
    least = {"bounded": -5.0, "burst": -0.1}.get(kind, -300.0)
    parts = inputs(t=70, b=2, h=1, least=least, scalar=kind == "head")
    if kind == "burst":
        parts[3][:, np.arange(70) % 32 < 8] = -300.0
    first = np.zeros((2, 70), bool)
    first[1, [0, 5, 16, 40, 64]] = True
    weights = np.random.default_rng(0).standard_normal((2, 70, 1, 5)).astype(np.float32)

    def run(form):
        def loss(*parts):
            out, end = form(*parts, first)
            return jnp.sum(out * weights) + jnp.sum(end), (out, end)

        return jax.jit(jax.value_and_grad(loss, argnums=range(5), has_aux=True))(*parts)

    kernel = functools.partial(delta_rule, kernel="pallas", chunk=chunk, bounded=kind == "bounded")
    ((_, got), got_grads), ((_, want), want_grads) = run(kernel), run(recurrent)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, atol=5e-6)
    for a, b in zip(got_grads, want_grads, strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5 * np.abs(b).max())


def test_one_decay_for_all_channels_is_gated_deltanet():
    parts = inputs(t=20, scalar=True)
    wide = (*parts[:3], np.broadcast_to(parts[3][..., None], parts[1].shape), parts[4])
    for a, b in zip(FORMS[2](*wide), FORMS[2](*parts), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-6)


@pytest.mark.parametrize("size", [1, 8, 64])
def test_inverse_by_tiles(size):
    lower = np.tril(np.random.default_rng(0).uniform(-1, 1, (3, size, size)) * 0.3, -1)
    np.testing.assert_allclose(
        inverse(jnp.asarray(lower, jnp.float32)) @ (np.eye(size) + lower), np.tile(np.eye(size), (3, 1, 1)), atol=3e-5
    )


def test_halves_in_bfloat16_and_the_state_in_float32():
    parts = tuple(jnp.asarray(x, jnp.bfloat16) for x in inputs(t=48, least=-5.0))
    want, _ = FORMS[0](*(x.astype(jnp.float32) for x in parts))

    @jax.jit
    def run(*parts):
        (out, state), pull = jax.vjp(functools.partial(chunked, chunk=16, bounded=True), *parts)
        return out, state, pull((out, state))

    out, state, grads = run(*parts)
    assert out.dtype == jnp.bfloat16 and state.dtype == jnp.float32
    np.testing.assert_allclose(out.astype(np.float32), want, atol=2**-8 * np.abs(want).max())  # one rounding
    for grad in grads:
        assert grad.dtype == jnp.bfloat16 and np.isfinite(grad.astype(np.float32)).all()


def shapes(t, h=2, k=64):
    x, row = jax.ShapeDtypeStruct((1, t, h, k), jnp.float32), jax.ShapeDtypeStruct((1, t, h), jnp.float32)
    return x, x, x, x, row


def test_memory_grows_with_the_length_and_no_faster():
    """No `[n, n]`, no decays between all pairs `[n/C, C, C, k]`: that alone would be 64 times the inputs at C = 64."""

    def peak(form, t):
        loss = jax.jit(jax.grad(lambda *parts: jnp.sum(form(*parts)[0]), argnums=range(5)))
        return loss.lower(*shapes(t)).compile().memory_analysis().temp_size_in_bytes

    size = {t: peak(chunked, t) for t in (8192, 16384)}
    given = 4 * 16384 * 2 * 64 * 4
    assert size[16384] < 2.1 * size[8192]
    assert size[16384] < 8 * given


@pytest.mark.parametrize(("scalar", "bounded"), [(False, True), (False, False), (True, False)])
def test_the_cost_formula_counts_the_products(scalar, bounded):
    x, _, _, g, row = shapes(128, h=1, k=8)
    args = (x, x, x, row if scalar else g, row)
    jaxpr = jax.make_jaxpr(functools.partial(delta_rule, kernel="chunk", chunk=64, bounded=bounded))(*args)
    assert contract.dot_flops(jaxpr.jaxpr) == 2 * chunk_flops(64, 8, 8, scalar=scalar, bounded=bounded)


def test_eight_devices_compose_the_states_of_their_pieces():
    """Documents inside pieces and at their edges; outputs, last state and every gradient are those of one device."""
    parts, rng = inputs(t=32, h=2), np.random.default_rng(1)
    first = np.zeros((2, 32), bool)
    first[1, [0, 5, 8, 20]] = True
    state = rng.standard_normal((2, 2, 6, 5)).astype(np.float32)
    want, states = oracle(*parts, first, state)
    weights = rng.standard_normal(want.shape).astype(np.float32)

    def loss(parts, state):
        out, end = delta_rule(*parts, first, state, kernel="chunk", chunk=4)
        return jnp.sum(out * weights) + jnp.sum(end**2), (out, end)

    run = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)
    (_, _), one = jax.jit(run)(parts, state)
    with use_mesh(build_mesh({"context": 8})):
        (_, (out, end)), many = jax.jit(run)(parts, state)
    np.testing.assert_allclose(out, want, atol=2e-6)
    np.testing.assert_allclose(end, states[-1], atol=2e-6)
    for a, b in zip(jax.tree.leaves(many), jax.tree.leaves(one), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5 * np.abs(b).max())


def test_states_compose_over_any_split():
    parts = inputs(t=13)
    want, states = oracle(*parts)
    out, state = [], np.zeros((2, 3, 6, 5), np.float32)
    for a, b in ((0, 3), (3, 4), (4, 13)):
        piece, state = delta_rule(*(x[:, a:b] for x in parts), state=state, kernel="chunk", chunk=4)
        out.append(piece)
    np.testing.assert_allclose(np.concatenate(out, axis=1), want, atol=2e-6)
    np.testing.assert_allclose(state, states[-1], atol=2e-6)
