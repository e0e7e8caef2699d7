"""KDA and Gated DeltaNet as layers: their formulas in numpy, documents, every split, drafts that are rejected, costs, one-line errors."""

import functools

import contract
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.cache import RecurrentCache
from jaxllm.errors import UserError
from jaxllm.layers.base import Context
from jaxllm.layers.gdn import GatedDeltaNet
from jaxllm.layers.gqa import GQA
from jaxllm.layers.kda import KDA
from jaxllm.mesh import build_mesh, param_shardings, use_mesh
from jaxllm.params import declare, is_declared

D = 32


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def silu(x):
    return x * sigmoid(x)


def softplus(x):
    return np.log1p(np.exp(x))


def layer_parameters(layer, x, ctx, seed=0):
    """Every parameter drawn anew: constants of the initialiser would hide a fault."""
    declared = jax.eval_shape(layer.init, jax.random.key(0), x, ctx)["params"]
    rng = np.random.default_rng(seed)

    def draw(box):
        return (0.4 * rng.standard_normal(box.value.shape)).astype(np.float32)

    return jax.tree.map(draw, declared, is_leaf=is_declared)


def formula(layer, p, x, g_of, gate_of, normed, key_heads):
    """One document `x [t d]`, by the recurrence, in float64."""
    p = jax.tree.map(lambda a: np.asarray(a, np.float64), p)
    h, k, v = layer.state_sizes

    def convolved(name):
        y, w = np.einsum("td,dhk->thk", x, p[f"{name}_proj"]), p[f"{name}_conv"]
        padded = np.concatenate([np.zeros((3, *y.shape[1:])), y])
        return silu(sum(w[j] * padded[j : j + len(x)] for j in range(4)))

    def unit(y):
        return np.repeat(y / np.sqrt(np.sum(y * y, -1, keepdims=True) + 1e-6), h // key_heads, axis=1)

    query, key, value = unit(convolved("q")) * k**-0.5, unit(convolved("k")), convolved("v")
    g, beta = g_of(p), sigmoid(x @ p["b_proj"])
    state, out = np.zeros((h, k, v)), np.zeros((len(x), h, v))
    for t in range(len(x)):
        state = np.exp(g[t])[..., None] * state
        error = value[t] - np.einsum("hkv,hk->hv", state, key[t])
        state = state + np.einsum("hk,hv,h->hkv", key[t], error, beta[t])
        out[t] = np.einsum("hkv,hk->hv", state, query[t])
    rms = out / np.sqrt(np.mean(out * out, -1, keepdims=True) + layer.norm_eps)
    return np.einsum("thv,hvd->td", rms * p["o_norm"]["scale"] * normed(gate_of(p)), p["o_proj"])


KDAS = {
    "bounded": {"output_gate_rank": 0, "value_dim": 12},
    "softplus": {"gate_form": "softplus", "gate_rank": 5, "output_gate_rank": 6},
}


@pytest.mark.parametrize("kind", KDAS)
def test_kda_is_its_formula(kind):
    layer = KDA(num_heads=2, head_dim=8, d_model=D, **KDAS[kind])
    x = np.random.default_rng(1).standard_normal((1, 9, D)).astype(np.float32)
    ctx = Context.whole(np.zeros((1, 9), int))
    params = layer_parameters(layer, x, ctx)

    def decays(p):
        z = np.einsum("td,dr,rhk->thk", x[0], p["f_a_proj"], p["f_b_proj"]) + p["dt_bias"]
        scale = np.exp(p["A_log"])[:, None]
        return -5 * sigmoid(scale * z) if kind == "bounded" else -scale * softplus(z)

    def gate(p):
        if kind == "bounded":
            return np.einsum("td,dhv->thv", x[0], p["g_proj"])
        return np.einsum("td,dr,rhv->thv", x[0], p["g_a_proj"], p["g_b_proj"])

    got = layer.apply({"params": params}, x, ctx)[0][0]
    np.testing.assert_allclose(got, formula(layer, params, x[0], decays, gate, sigmoid, 2), atol=2e-5)


def test_gated_deltanet_is_its_formula_and_its_value_heads_share_keys():
    layer = GatedDeltaNet(num_v_heads=4, num_k_heads=2, head_k_dim=6, head_v_dim=10, d_model=D)
    x = np.random.default_rng(1).standard_normal((1, 9, D)).astype(np.float32)
    ctx = Context.whole(np.zeros((1, 9), int))
    params = layer_parameters(layer, x, ctx)

    def decays(p):
        return (-np.exp(p["A_log"]) * softplus(x[0] @ p["a_proj"] + p["dt_bias"]))[..., None]

    def gate(p):
        return np.einsum("td,dhv->thv", x[0], p["g_proj"])

    got = layer.apply({"params": params}, x, ctx)[0][0]
    np.testing.assert_allclose(got, formula(layer, params, x[0], decays, gate, silu, 2), atol=2e-5)


# ---- documents, splits, drafts: a chunked layer beside attention -------------------------------------------------

T = 37  # longer than the few tokens that a call with a cache does as one piece


@functools.cache
def hybrid():
    """Two KDA layers and a Gated DeltaNet one, of chunks of 4, to one of attention with rotation, as compiled calls."""
    mixers = {
        "linear": functools.partial(KDA, num_heads=2, chunk_size=4, kernel="chunk"),
        "head": functools.partial(GatedDeltaNet, num_v_heads=2, num_k_heads=1, chunk_size=4, kernel="chunk"),
        "global": functools.partial(GQA, num_heads=2),
    }
    model = contract.model_of(mixers, "linear/dense*2 head/dense global/dense", scan=False)
    params = contract.randomised(model)
    whole = jax.jit(lambda ctx: model.apply({"params": params}, ctx)[1].logits)
    step = jax.jit(lambda ctx, cache: (lambda r: (r[0], r[1].logits))(model.apply({"params": params}, ctx, cache)))
    return model, whole, step


def tokens(t=T, seed=1):
    return np.random.default_rng(seed).integers(0, contract.VOCAB, (1, t))


def test_a_document_does_not_see_the_one_before_wherever_it_ends_in_a_chunk():
    _, whole, _ = hybrid()
    row = tokens()
    # At a border of chunks the document alone is cut into the same chunks, so only its sums' order within one operation may differ. Inside
    # a chunk of 4 it is cut elsewhere, and its sums are others: logits up to 4.7, float32, 3.4e-5 at most over the borders 1 to 12.
    for end, off in ((5, 4e-5), (8, 4e-6)):
        segments = np.where(np.arange(T) < end, 1, 2)[None]
        changed = row.copy()
        changed[0, end - 1] = (row[0, end - 1] + 1) % contract.VOCAB
        a, b = whole(Context.whole(row, segments)), whole(Context.whole(changed, segments))
        np.testing.assert_array_equal(a[:, end:], b[:, end:])
        rolled = np.roll(row, -end, axis=1)
        alone = whole(Context.whole(rolled, (np.arange(T) < T - end).astype(int)[None]))
        np.testing.assert_allclose(a[:, end:], alone[:, : T - end], atol=off)


def test_pieces_of_a_prompt_of_any_length_are_the_whole():
    model, whole, step = hybrid()
    row = tokens()
    full = np.asarray(whole(Context.whole(row)))
    for split in (20, 5):  # long then long; a few then long: both forms of a call with a cache, one after the other
        cache = model.init_cache(1, 64, "float32")
        for a, b in ((0, split), (split, T)):
            padded = np.zeros((1, T), int)
            padded[:, : b - a] = row[:, a:b]
            cache, logits = step(Context.step(padded, np.array([a]), np.array([b - a])), cache)
            np.testing.assert_allclose(logits[:, : b - a], full[:, a:b], atol=4e-5)  # logits up to 4: 1e-5 of them


def recurrent_parts(cache):
    """States and windows of all recurrent layers."""
    kept = [c for period in cache.values() for c in period.values() if isinstance(c, RecurrentCache)]
    assert len(kept) == 3
    return [x for c in kept for x in (c.state, c.window)]


@pytest.mark.parametrize("width", [4, 24], ids=["few", "long"])
def test_rejected_drafts_leave_what_a_run_over_the_committed_tokens_leaves(width):
    """Three drafts a round, all wrong, or right for j tokens and then wrong: the states are those of a fresh run, and so is the text.

    few: a verify step of exactly the drafts. long: the same drafts at the end of a call whose padding runs longer.
    """
    model, _, step = hybrid()
    truth = tokens(seed=4)[0]
    cache = model.init_cache(1, 64, "float32", draft=3)

    def call(feed, length, new, tentative, accepted, cache):
        padded = np.zeros((1, width), int)
        padded[0, : len(feed)] = feed
        counts = (np.array([n]) for n in (length, new, tentative, accepted))
        length, new, tentative, accepted = counts
        return step(Context.step(padded, length, new, tentative=tentative, accepted=accepted), cache)

    cache, _ = call(truth[:2], 0, 2, 0, 0, cache)
    length, accepted = 2, 0
    for right in (0, 1, 3, 2, 0):
        start = length + accepted
        feed = truth[start : start + 4].copy()
        if right < 3:
            feed[1 + right] = (feed[1 + right] + 1) % contract.VOCAB
        cache, logits = call(feed, start, 4, 3, accepted, cache)
        fresh, want = model.init_cache(1, 64, "float32"), None
        fresh, want = step(
            Context.step(np.pad(truth[None, : start + 1], ((0, 0), (0, T - start - 1))), [0], [start + 1]), fresh
        )
        # The first layer's inputs are the same numbers: 1e-6 of the largest entry. Deeper ones have been rounded in other orders before;
        # two runs without any draft, in one call and token by token, are 2e-6 apart there.
        for i, (a, b) in enumerate(zip(recurrent_parts(cache), recurrent_parts(fresh), strict=True)):
            np.testing.assert_allclose(a, b, rtol=0, atol=(1e-6 if i < 2 else 4e-6) * max(1.0, np.abs(b).max()))
        np.testing.assert_allclose(logits[0, 0], want[0, start], atol=2e-5)
        length, accepted = start + 1, right


def test_long_calls_with_drafts_at_their_end():
    """More tokens than one piece holds, of which the last three are tentative: right outputs, and a state without them."""
    model, whole, step = hybrid()
    row = tokens()
    full = np.asarray(whole(Context.whole(row)))
    cache = model.init_cache(1, 64, "float32", draft=3)
    cache, logits = step(Context.step(row[:, :24], [0], [24], tentative=[3]), cache)
    np.testing.assert_allclose(logits, full[:, :24], atol=2e-5)
    _, logits = step(Context.step(row[:, 22:26], [22], [4], accepted=[1]), cache)
    np.testing.assert_allclose(logits, full[:, 22:26], atol=2e-5)


def test_the_state_does_not_grow_and_holds_no_length_of_its_own():
    layer = KDA(num_heads=2, d_model=D)
    sizes = {n: jax.tree.map(jnp.shape, layer.init_cache(3, n, jnp.float32, draft=2)) for n in (8, 1 << 20)}
    assert sizes[8] == sizes[1 << 20]
    cache = layer.init_cache(3, 8, jnp.bfloat16)
    assert cache.state.dtype == jnp.float32 and cache.state.shape == (3, 2, 16, 16)
    assert cache.window.dtype == jnp.float32  # the layer's own precision: what is replayed must not be rounded
    assert all(leaf.ndim > 1 for leaf in jax.tree.leaves(cache))


def test_what_cannot_be_rewound_is_refused_at_set_up():
    for layer in (KDA(num_heads=2, d_model=D), GatedDeltaNet(num_v_heads=2, d_model=D)):
        with pytest.raises(UserError, match="draft: -1"):
            layer.init_cache(1, 8, jnp.float32, draft=-1)


def test_devices_that_split_the_length_agree_with_one():
    mixers = {"linear": functools.partial(KDA, num_heads=2, chunk_size=4)}
    model = contract.model_of(mixers, "2* linear/dense")
    subject = contract.Subject(model)
    params = subject.params
    row = np.tile(tokens(32), (2, 1))
    ctx = Context.whole(row, np.array([[1] * 32, [1] * 7 + [2] * 9 + [3] * 14 + [0] * 2]))
    run = jax.jit(lambda p: model.apply({"params": p}, ctx)[1].logits)
    want = run(params)
    mesh = build_mesh({"data": 2, "context": 4})
    params = jax.device_put(params, param_shardings(declare(model), mesh))
    with use_mesh(mesh):
        got = jax.jit(lambda p: model.apply({"params": p}, ctx)[1].logits)(params)
    contract.close(got[0], want[0], subject.allowed(row[:1])[0])
    np.testing.assert_allclose(got[1, :30], want[1, :30], atol=2e-5)


@pytest.mark.parametrize(
    "make", [functools.partial(KDA, num_heads=2), functools.partial(GatedDeltaNet, num_v_heads=2)], ids=["kda", "gdn"]
)
def test_cost_of_whole_sequences_counts_the_chunked_form(make):
    layer = make(d_model=D, chunk_size=16, kernel="chunk")
    x, ctx = jnp.zeros((2, 64, D)), Context.whole(jnp.zeros((2, 64), int))
    params = layer_parameters(layer, x, ctx)
    jaxpr = jax.make_jaxpr(lambda p, x: layer.apply({"params": p}, x, ctx)[0])(params, x)
    assert layer.cost(2, 64, 64, "float32").flops == contract.dot_flops(jaxpr.jaxpr)
    assert layer.cost(2, 128, 128, "float32").flops == 2 * layer.cost(2, 64, 64, "float32").flops


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: KDA(num_heads=5, d_model=D), "num_heads: 5 does not divide d_model=32"),
        (lambda: KDA(num_heads=2, d_model=D, gate_form="hard"), "gate_form: 'hard' is not one of bounded, softplus"),
        (lambda: KDA(num_heads=2, d_model=D, gate_lower_bound=-6.0), r"gate_lower_bound: -6.0 must be in \[-5.0, 0\)"),
        (lambda: KDA(num_heads=2, d_model=D, conv_size=0), "conv_size: 0 must be at least 1"),
        (lambda: KDA(num_heads=2, d_model=D, chunk_size=48), "chunk_size: 48 must be a power of two"),
        (lambda: KDA(num_heads=2, d_model=D, kernel="fast"), "kernel: 'fast' is not one of"),
        (lambda: GatedDeltaNet(num_v_heads=4, num_k_heads=3, d_model=D), "num_k_heads: 3 must divide num_v_heads=4"),
    ],
)
def test_a_wrong_field_is_one_line(make, words):
    with pytest.raises(UserError, match=words):
        make()
