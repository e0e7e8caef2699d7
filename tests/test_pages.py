"""Pools: which leaves have pages, what is refused, and that a donated pool is written in place."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.cache import CompressedCache, KVCache, RecurrentCache, RingCache, cache_bytes
from jaxllm.compose import component
from jaxllm.errors import UserError
from jaxllm.layers.base import Context
from jaxllm.layers.gqa import GQA
from jaxllm.layers.mlp import MLP
from jaxllm.layers.rope import RoPE
from jaxllm.model import LanguageModel
from jaxllm.pages import PAGES, Leaf, Pages, leaves_of, paged_of
from jaxllm.params import declare, is_declared, unstack


def compressed(m):
    def make(b, length):
        e = max(length // m, 1)
        return CompressedCache(jnp.zeros((b, 7, 3)), jnp.zeros((b, 5, 2)), jnp.zeros((b, e, 3)), jnp.zeros((b, e, 4)))

    return make


def test_leaves_are_pooled_by_how_they_grow():
    kv = Leaf(2, 1)
    assert leaves_of(lambda b, n: KVCache.zeros(b, 2, n, 4, 6, "float32"), 32) == (kv, kv)
    assert leaves_of(lambda b, n: KVCache.zeros(b, 1, n, 4, 6, "float32"), 32) == (Leaf(1, 1), Leaf(1, 1))
    state = Leaf(None, 1)
    for window in (5, 64):  # a ring that the length cuts short grows with it, and is a ring all the same
        ring = leaves_of(lambda b, n, w=window: RingCache.zeros(b, 2, min(n, w), 4, 4, "float32"), 32)
        assert ring == (state, state, state)
    for draft in (0, 2):  # no drafts: an axis of no places, at any length
        recurrent = leaves_of(lambda b, n, d=draft: RecurrentCache.zeros((b, 2, 4, 4), 3, 8, 5, d, "float32"), 32)
        assert recurrent == (state, state, state)
    for m in (3, 4, 5):
        assert leaves_of(compressed(m), 64) == (state, state, Leaf(1, m), Leaf(1, m))


@pytest.mark.parametrize(
    ("kind", "places"),
    [("kda", "sss"), ("swa_global", "sss"), ("csa", "ss44"), ("mla", "11"), ("dsa_pooled", "112s")],
)
def test_every_kind_is_pooled_alike_with_drafts_and_without(kind, places):
    """s: a state; a number: the tokens of a place."""
    make = component("mixer", kind)(d_model=256, parent=None).init_cache
    for draft in (0, 3):
        leaves = leaves_of(functools.partial(make, dtype="float32", draft=draft), 768)
        assert "".join("s" if leaf.axis is None else str(leaf.tokens) for leaf in leaves) == places


def test_a_page_of_part_of_an_entry_is_refused():
    with pytest.raises(UserError, match="page_size: 8 is not a multiple of 3"):
        paged_of(compressed(3), 2, 64, Pages(4, 8))
    paged = paged_of(compressed(3), 2, 64, Pages(4, 6))
    assert paged.pool.entries.shape == (4, 2, 3) and paged.pool.window.shape == (2, 7, 3)


def test_pages_and_states_are_copied_apart():
    paged = paged_of(compressed(2), 3, 16, Pages(4, 4))
    paged = jax.tree.map(lambda x: x + jnp.arange(x.shape[0], dtype=x.dtype)[:, None, None], paged)
    copied = paged.copy(jnp.array([1, 0]), jnp.array([3, 0]))
    np.testing.assert_array_equal(copied.pool.entries[:, 0, 0], [0, 1, 2, 1])
    np.testing.assert_array_equal(copied.pool.window, paged.pool.window)
    moved = paged.copy(jnp.array([2]), jnp.array([1]), pages=False)
    np.testing.assert_array_equal(moved.pool.window[:, 0, 0], [0, 2, 2])
    np.testing.assert_array_equal(moved.pool.entries, paged.pool.entries)


def test_whatever_reads_pages_a_layer_gives_the_same():
    """Two rows of a layer, three tokens and then one, by every kernel."""
    layer = GQA(d_model=32, num_heads=4, num_kv_heads=2, head_dim=8, rope=RoPE())
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((2, 4, 32), np.float32))
    shapes = {"q_proj": (32, 4, 8), "k_proj": (32, 2, 8), "v_proj": (32, 2, 8), "o_proj": (4, 8, 32)}
    params = {"params": {name: rng.standard_normal(shape, np.float32) / 6 for name, shape in shapes.items()}}
    tables = {PAGES: np.array([[3, 1], [2, 4]], np.int32)}

    def outputs(x, kernel):
        if kernel is None:
            return layer.apply(params, x, Context.whole(jnp.zeros((2, 4))))[0]
        cache = paged_of(functools.partial(layer.init_cache, dtype="float32"), 2, 4, Pages(5, 2, kernel))
        out = []
        for start, end in ((0, 3), (3, 4)):
            ctx = Context.step(jnp.zeros((2, end - start)), jnp.full(2, start), tables=tables)
            y, cache, *_ = layer.apply(params, x[:, start:end], ctx, cache)
            out.append(y)
        return jnp.concatenate(out, axis=1)

    want, *got = jax.jit(lambda x: [outputs(x, kernel) for kernel in (None, "naive", "blocks", "pallas")])(x)
    for one in got:
        np.testing.assert_allclose(one, want, atol=3e-6)


@pytest.mark.parametrize(("kind", "calls"), [("gqa", [(4, 1), (1, 16)]), ("mqa", [(1, 1)]), ("mla", [(4, 1)])])
def test_a_donated_pool_is_never_copied(kind, calls):
    model = LanguageModel(
        vocab_size=64,
        d_model=512,
        layers="m/dense",
        mixers={"m": component("mixer", kind)},
        ffns={"dense": functools.partial(MLP, d_ff=64)},
        dtype="float32",
    )
    decoder = model.unrolled()
    shapes = jax.tree.map(lambda box: box.value, declare(model), is_leaf=is_declared)
    params = jax.eval_shape(lambda p: decoder.prepare(unstack(model, p)), shapes)
    pools = jax.eval_shape(lambda: decoder.init_cache(5, 256, pages=Pages(1024, 16)))
    largest = max(leaf.size for leaf in jax.tree.leaves(pools))
    call = jax.jit(lambda p, ctx, c: decoder.apply({"params": p}, ctx, c), donate_argnums=2)
    for b, t in calls:
        table = {PAGES: jnp.zeros((b, 16), jnp.int32)}
        ctx = Context.step(jnp.zeros((b, t), jnp.int32), jnp.zeros(b), tables=table)
        compiled = call.lower(params, ctx, pools).compile()
        assert compiled.memory_analysis().alias_size_in_bytes >= cache_bytes(pools)
        assert compiled.memory_analysis().temp_size_in_bytes < 4 * largest
        for dims, line in re.findall(r"\w+\[([\d,]+)\]\S* ((?:copy|transpose)\(.*)", compiled.as_text()):
            assert int(np.prod([int(n) for n in dims.split(",")])) != largest, f"b={b} t={t}: [{dims}] {line}"
