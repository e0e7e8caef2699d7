"""Grouped-query attention with everything on against its formula in numpy, the invariants between its variants, and its ring."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.cache import EMPTY, KVCache, RingCache, cache_bytes
from jaxllm.errors import UserError
from jaxllm.layers.base import Context
from jaxllm.layers.gqa import GQA
from jaxllm.layers.rope import RoPE
from jaxllm.ops.rope import inverse_frequencies
from jaxllm.params import is_declared

D, B, T = 16, 2, 14


def params_of(layer, seed=0):
    """Normal numbers for every parameter the layer declares: nothing is 0 or 1."""
    ctx = Context.whole(jnp.zeros((1, 2), jnp.int32))
    shapes = jax.eval_shape(lambda: layer.init(jax.random.key(0), jnp.zeros((1, 2, D)), ctx))["params"]
    rng = np.random.default_rng(seed)

    def draw(box):
        return rng.standard_normal(box.value.shape).astype(np.float32) / 4

    return jax.tree.map(draw, shapes, is_leaf=is_declared)


def x_of(t=T, b=B, seed=1):
    return np.random.default_rng(seed).standard_normal((b, t, D)).astype(np.float32)


@functools.partial(jax.jit, static_argnums=0)
def apply(layer, params, x, ctx, cache):
    return layer.apply({"params": params}, x, ctx, cache)[:2]


def whole(layer, params, x, segments=None):
    ctx = Context.whole(jnp.zeros(x.shape[:2], jnp.int32), segments)
    return np.asarray(apply(layer, params, x, ctx, None)[0])


def rms(x, scale):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6) * scale


def turned(x, partial, theta=10000.0):
    """Half-split rotation of `x [t h k]`, in float64."""
    dim = int(x.shape[-1] * partial)
    angles = np.arange(x.shape[0])[:, None, None] * inverse_frequencies(dim, theta).astype(np.float64)
    a, b, rest = x[..., : dim // 2], x[..., dim // 2 : dim], x[..., dim:]
    c, s = np.cos(angles), np.sin(angles)
    return np.concatenate([a * c - b * s, b * c + a * s, rest], axis=-1)


def textbook(layer, p, x):
    """One row `x [t d]`, head by head and query by query, in float64."""
    p = jax.tree.map(lambda a: np.asarray(a, np.float64), p)
    t = x.shape[0]
    q, k, v = (np.einsum("td,dhk->thk", x, p[f"{n}_proj"]) + p[f"{n}_bias"] for n in "qkv")

    def flat(a):
        return a.reshape(t, -1)

    q = turned(rms(flat(q), p["q_norm"]["scale"]).reshape(q.shape), layer.rope.partial)
    k = turned(rms(flat(k), p["k_norm"]["scale"]).reshape(k.shape), layer.rope.partial)
    v = v * layer.value_scale
    y = np.zeros((t, D))
    for h in range(layer.num_heads):
        g = h // (layer.num_heads // layer.kv_heads)
        for i in range(t):
            keys = np.arange(max(0, i - layer.window + 1), i + 1)
            s = np.array([q[i, h] @ k[j, g] for j in keys]) * layer.query_pre_attn_scalar**-0.5
            s = layer.softcap * np.tanh(s / layer.softcap)
            e = np.exp(s)
            o = sum(w * v[j, g] for w, j in zip(e, keys, strict=True)) / (e.sum() + np.exp(p["sinks"][h]))
            o = o / (1 + np.exp(-(x[i] @ p["gate_proj"][:, h])))
            y[i] += o @ p["o_proj"][h]
    return y + p["o_bias"]


EVERYTHING = functools.partial(
    GQA,
    d_model=D,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    value_dim=6,
    rope=RoPE(partial=0.5),
    window=5,
    sinks=True,
    softcap=3.0,
    query_pre_attn_scalar=5.0,
    qk_norm=True,
    qk_norm_all_heads=True,
    qkv_bias=True,
    out_bias=True,
    value_scale=0.7,
    gate=True,
)


def test_everything_at_once_is_the_textbook_formula():
    layer = EVERYTHING()
    params, x = params_of(layer), x_of()
    got = whole(layer, params, x)
    for row in range(B):
        np.testing.assert_allclose(got[row], textbook(layer, params, np.asarray(x[row], np.float64)), atol=1e-5)
    # Fused for decoding, with a gate, biases and two widths, it computes the same.
    np.testing.assert_allclose(whole(layer, layer.prepare(params), x), got, atol=1e-6)


def variant(base, params, **fields):
    return whole(base.clone(**fields), params, x_of())


def test_invariants_between_variants():
    base = GQA(d_model=D, num_heads=4, num_kv_heads=2)
    params = params_of(base)
    full = whole(base, params, x_of())
    close = functools.partial(np.testing.assert_allclose, atol=2e-6)
    close(variant(base, params, window=T), full)
    close(variant(base, params, chunk=T), full)
    close(variant(base, params, window=1, global_tokens=T), full)
    close(variant(base, params, softcap=1e6), full)
    close(variant(base, params | {"sinks": jnp.full(4, -1e9)}, sinks=True), full)
    close(variant(base, params, query_pre_attn_scalar=16.0), variant(base, params, scale=0.25))
    close(variant(base, params, value_scale=0.5), 0.5 * full)
    close(variant(base, params | {"gate_proj": jnp.zeros((D, 4, 4))}, gate=True), 0.5 * full)
    # A window of one key is the value itself; as many kv heads as heads is MHA, and copies of one head are MQA.
    own = np.einsum("btd,dgk->btgk", x_of(), params["v_proj"])[:, :, [0, 0, 1, 1]]
    close(variant(base, params, window=1), np.einsum("bthk,hkd->btd", own, params["o_proj"]), atol=1e-5)
    repeated = {n: jnp.repeat(params[n], 2, axis=1) for n in ("k_proj", "v_proj")}
    close(variant(base, params | repeated, num_kv_heads=4), full)
    one = {n: params[n][:, :1] for n in ("k_proj", "v_proj")}
    copies = {n: jnp.repeat(one[n], 2, axis=1) for n in one}
    close(variant(base, params | one, num_kv_heads=1), variant(base, params | copies))


def test_norms_after_rope_zero_centred_and_without_weight():
    base = GQA(d_model=D, num_heads=4, num_kv_heads=2, qk_norm=True)
    params = params_of(base)
    bare = {k: v for k, v in params.items() if not k.endswith("_norm")}
    ones = {f"{n}_norm": {"scale": jnp.ones(4)} for n in "qk"}
    zeros = {f"{n}_norm": {"scale": jnp.zeros(4)} for n in "qk"}
    none = variant(base, bare, qk_norm_weight="none")
    np.testing.assert_allclose(variant(base, bare | ones), none, atol=1e-6)
    np.testing.assert_allclose(variant(base, bare | zeros, qk_norm_weight="zero_centred"), none, atol=1e-6)
    # A rotation keeps lengths, so without a weight the order makes no difference; with one it does.
    np.testing.assert_allclose(variant(base, bare, qk_norm_weight="none", qk_norm_after_rope=True), none, atol=1e-6)
    after = variant(base, params, qk_norm_after_rope=True)
    assert np.abs(after - variant(base, params)).max() > 1e-3


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"scale": 0.1, "query_pre_attn_scalar": 64.0}, "say the same thing"),
        ({"query_pre_attn_scalar": 0.0}, "must be > 0"),
        ({"window": 0}, "window: 0"),
        ({"global_tokens": 2}, "global_tokens: 2 means nothing"),
        ({"qk_norm_all_heads": True}, "qk_norm: false"),
        ({"qk_norm": True, "qk_norm_weight": "gemma"}, "qk_norm_weight: 'gemma' is not one of"),
        ({"kernel": "flash"}, "kernel: 'flash'"),
        ({"value_dim": 0}, "value_dim: 0"),
    ],
)
def test_a_wrong_field_is_named(fields, words):
    with pytest.raises(UserError, match=words):
        GQA(d_model=D, num_heads=4, **fields)


class Decoder:
    """One layer with a cache of `length`, fed pieces of `x`."""

    def __init__(self, layer, params, length, draft=0, b=B):
        self.layer, self.params = layer, params
        self.cache = layer.init_cache(b, length, jnp.float32, draft=draft)
        self.at = np.zeros(b, np.int32)

    def feed(self, x, new=None, tentative=0, keep=None):
        """Feed `new [b]` tokens of `x [b t d]`; of the last `tentative`, `keep` stay."""
        new = np.full(len(x), x.shape[1]) if new is None else np.asarray(new)
        ctx = Context.step(np.zeros(x.shape[:2]), self.at, new, tentative=np.full(len(x), tentative))
        y, self.cache = apply(self.layer, self.params, x, ctx, self.cache)
        self.at = self.at + new - (tentative if keep is None else tentative - keep)
        return np.asarray(y)


def rows_at(x, starts, n):
    return np.stack([x[r, s : s + n] for r, s in enumerate(starts)])


RINGS = {
    "window": {"window": 8, "sinks": True},
    "dilated_global_mqa": {"window": 3, "dilation": 2, "global_tokens": 2, "num_kv_heads": 1},
}


@pytest.mark.parametrize("case", RINGS)
def test_long_prefill_then_decode_in_a_ring_is_the_whole_sequence(case):
    """150 tokens by blocks into a ring of 8, padded, at two lengths; then chunks of 12, 1, 3 and 1."""
    layer = GQA(**{"d_model": D, "num_heads": 4, "num_kv_heads": 2} | RINGS[case])
    params, x = params_of(layer), x_of(t=180)
    want = whole(layer, params, x)
    decoder = Decoder(layer, params, length=200)
    assert isinstance(decoder.cache, RingCache) and decoder.cache.capacity <= 8
    got = decoder.feed(x[:, :150], new=[150, 131])
    close = functools.partial(np.testing.assert_allclose, atol=1e-5)
    close(got[0], want[0, :150])
    close(got[1, :131], want[1, :131])
    got = decoder.feed(rows_at(x, decoder.at, 12), new=[12, 11])
    close(got[0], want[0, 150:162])
    close(got[1, :11], want[1, 131:142])
    for n in (1, 3, 1):
        at = decoder.at.copy()
        close(decoder.feed(rows_at(x, at, n)), rows_at(want, at, n))


def test_a_ring_rewinds_by_what_was_tentative_and_equals_a_cold_prefill():
    """W = 8: of 20 tokens in one call the last 3 are rejected; then drafts of 3 are verified with 0 to 3 of them kept."""
    layer = GQA(d_model=D, num_heads=4, num_kv_heads=2, window=8)
    params, x = params_of(layer), x_of(t=40)
    want, wrong = whole(layer, params, x), x_of(t=40, seed=9)
    decoder = Decoder(layer, params, length=64, draft=3)
    assert decoder.cache.capacity == 11
    decoder.feed(np.concatenate([x[:, :17], wrong[:, 17:20]], axis=1), tentative=3)
    assert decoder.at.tolist() == [17, 17]
    for keep in (0, 2, 3, 1):
        at = int(decoder.at[0])
        piece = np.concatenate([x[:, at : at + 1 + keep], wrong[:, at + 1 + keep : at + 4]], axis=1)
        got = decoder.feed(piece, tentative=3, keep=keep)
        np.testing.assert_allclose(got[:, : 1 + keep], want[:, at : at + 1 + keep], atol=1e-5)
    # A call longer than the ring has room for meets the old ring without what was rejected just before.
    at = int(decoder.at[0])
    np.testing.assert_allclose(decoder.feed(x[:, at : at + 6]), want[:, at : at + 6], atol=1e-5)
    # What it holds is what a fresh ring would: the newest tokens, each at its place.
    held, committed = np.asarray(decoder.cache.positions), int(decoder.at[0])
    assert set(range(committed - 8, committed)) <= set(held[0].tolist())
    assert all(p % 11 == slot for slot, p in enumerate(held[0]) if p != EMPTY)


def test_changing_the_first_token_reaches_four_queries_of_a_window_of_four():
    layer = GQA(d_model=D, num_heads=4, window=4)
    params, x = params_of(layer), x_of(t=8)
    changed = x.copy()
    changed[:, 0] += 1.0

    def decode(x):
        decoder = Decoder(layer, params, 16)
        return np.concatenate([decoder.feed(x[:, i : i + 1]) for i in range(8)], axis=1)

    def chunk(x):
        return Decoder(layer, params, 16).feed(x)

    for run in (functools.partial(whole, layer, params), chunk, decode):
        a, b = run(x), run(changed)
        np.testing.assert_array_equal(a[:, 4:], b[:, 4:])
        assert (np.abs(a - b)[:, :4].max(axis=-1) > 1e-4).all()


def test_a_ring_is_never_longer_than_the_context_and_its_cost_is_what_it_holds():
    make = functools.partial(GQA, d_model=D, num_heads=4, num_kv_heads=2)

    def shape(layer, *a, **kw):
        return jax.eval_shape(lambda: layer.init_cache(2, *a, jnp.float32, **kw))

    ring = make(window=4, dilation=2, global_tokens=3)
    assert [shape(ring, n).capacity for n in (4, 11, 64)] == [4, 11, 11]
    assert shape(ring, 64, draft=5).capacity == 16
    assert isinstance(shape(make(dilation=2), 8), KVCache)
    for s in (6, 64):
        cost = ring.cost(2, 1, s, jnp.float32)
        assert cost.cache_per_token == 0 and 2 * cost.cache_constant == cost.cache_read == cache_bytes(shape(ring, s))
    assert ring.cost(1, 1, 1000, jnp.float32) == ring.cost(1, 1, 11, jnp.float32)
