"""Attention on pages: blocks and both Pallas kernels (interpreted) against all pages side by side, and whom each of them suits."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from elsewhere import TARGETS, lowered

from jaxllm.errors import UserError
from jaxllm.ops import paged_attention as module
from jaxllm.ops.mask import Mask
from jaxllm.ops.paged_attention import PagedKV, paged_attention, paged_blocks, paged_naive
from jaxllm.ops.paged_pallas import lacks, paged_decode

SIZE, PAGES = 4, 12  # tokens of a page, pages of a row
ROWS = [  # tokens in the cache before the call, new ones: an idle row, a first token, a page's border, a full table
    (0, 0),
    (0, 1),
    (3, 2),
    (4, 3),
    (17, 1),
    (45, 3),
]


def case(g=2, t=3, k=8, v=6, dtype=np.float32, garbage=np.nan):
    """Pools in which every place that no row has written holds garbage, and the rows' pages lie in no order."""
    rng = np.random.default_rng(0)
    b = len(ROWS)
    heads = () if g == 1 else (g,)
    table = 1 + rng.permutation(b * PAGES).reshape(b, PAGES).astype(np.int32)
    keys = np.full((1 + b * PAGES, *heads, SIZE, k), garbage, dtype)
    values = np.full((1 + b * PAGES, *heads, SIZE, v), garbage, dtype)
    for i, (length, new) in enumerate(ROWS):
        for s in range(length + new):
            keys[table[i, s // SIZE], ..., s % SIZE, :] = rng.standard_normal((*heads, k))
            values[table[i, s // SIZE], ..., s % SIZE, :] = rng.standard_normal((*heads, v))
    lengths, new = np.array(ROWS, np.int32).T
    positions = lengths[:, None] + np.arange(t, dtype=np.int32)
    valid = np.arange(t) < new[:, None]
    q = rng.standard_normal((b, t, 3 * g, k)).astype(dtype)
    pages = PagedKV(jnp.asarray(keys), jnp.asarray(values), jnp.asarray(table))
    return jnp.asarray(q), pages, jnp.asarray(positions), jnp.asarray(valid)


def brute(q, pages, positions, valid, mask, scale, softcap, sinks):
    """One query at a time, in float64."""
    q, keys, values = (np.asarray(x, np.float64) for x in (q, pages.k, pages.v))
    if keys.ndim == 3:
        keys, values = keys[:, None], values[:, None]
    positions, valid, table = (np.asarray(x) for x in (positions, valid, pages.table))
    b, t, h, _ = q.shape
    out = np.zeros((b, t, h, values.shape[-1]))
    for i, j, n in np.ndindex(b, t, h):
        if not valid[i, j]:
            continue
        at = np.arange(positions[i, j] + 1)
        at = at[mask.sees(positions[i, j], at)]
        g = n // (h // keys.shape[1])
        where = [(table[i, s // SIZE], g, s % SIZE) for s in at]
        scores = np.array([keys[w] @ q[i, j, n] for w in where]) * scale
        scores = scores if softcap is None else softcap * np.tanh(scores / softcap)
        weights = np.exp(scores)
        total = weights.sum() + (0 if sinks is None else np.exp(sinks[n]))
        out[i, j, n] = sum(w * values[place] for w, place in zip(weights, where, strict=True)) / total
    return out


@pytest.mark.parametrize(
    ("g", "t", "mask", "softcap", "sinks"),
    [(2, 3, Mask(), None, False), (1, 3, Mask(), 5.0, True), (2, 3, Mask(dilation=2), None, False)],
)
def test_every_way_of_reading_pages_is_the_same_attention(monkeypatch, g, t, mask, softcap, sinks):
    q, pages, positions, valid = case(g, t, garbage=7.0)
    sink = jnp.linspace(-1.0, 1.0, 3 * g) if sinks else None
    scores = {"scale": 0.4, "softcap": softcap, "sinks": sink}
    want = brute(q, pages, positions, valid, mask, 0.4, softcap, None if sink is None else np.asarray(sink))
    call = functools.partial(paged_naive, q, pages, positions, valid, mask, **scores)
    np.testing.assert_allclose(jnp.where(valid[:, :, None, None], jax.jit(call)(), 0), want, atol=2e-6)
    for block, most in ((4, 0), (20, 0), (4, 2**24), (20, 2**24), (256, 2**24)):  # 20: five pages do not divide twelve
        monkeypatch.setattr(module, "MOST_SCORES", most)
        got = jax.jit(functools.partial(paged_blocks, q, pages, positions, valid, mask, block=block, **scores))()
        np.testing.assert_allclose(got, want, atol=2e-6)
    if mask == Mask():
        for platform in ("tpu", "gpu"):
            decode = functools.partial(paged_decode, q, *pages, positions, valid, platform=platform, **scores)
            np.testing.assert_allclose(jax.jit(decode)(), want, atol=2e-6, err_msg=platform)


def test_long_calls_take_queries_in_blocks():
    """Eleven new tokens by four, on keys of their own and older ones."""
    q, pages, _, _ = case(t=11, garbage=0.0)
    lengths = jnp.array([0, 3, 4, 8, 17, 37], jnp.int32)
    positions = lengths[:, None] + jnp.arange(11)
    valid = jnp.arange(11) < jnp.array([11, 11, 0, 5, 1, 11])[:, None]
    want = paged_naive(q, pages, positions, valid, Mask(), scale=0.3)
    got = paged_blocks(q, pages, positions, valid, Mask(), scale=0.3, block=4)
    np.testing.assert_allclose(got, jnp.where(valid[:, :, None, None], want, 0), atol=2e-6)


def test_pages_behind_the_last_token_are_not_read():
    """A page of NaN that lies behind every row's last token, in blocks of their own, reaches no result."""
    q, pages, positions, valid = case(garbage=0.0)
    short = positions < 40
    last = PagedKV(*(x.at[pages.table[:, 10:]].set(jnp.nan) for x in (pages.k, pages.v)), pages.table)
    got = paged_blocks(q, last, jnp.minimum(positions, 39), valid & short, Mask(), scale=0.3, block=4)
    assert jnp.isfinite(got).all()


def test_who_reads_pages_is_chosen_by_name_and_refused_with_a_reason():
    q, pages, *_ = case()
    of = functools.partial(lacks, q, pages.k, pages.v)
    assert of(Mask(), "cpu", asked=True) is None and of(Mask(), "tpu", asked=False) is None
    assert "not on cpu" in of(Mask(), "cpu", asked=False)
    assert "causal" in of(Mask(dilation=2), "tpu", asked=True)
    assert "page_size is 4" in of(Mask(), "gpu", asked=True)
    with pytest.raises(UserError, match="server.kernel: 'page' is not one of auto"):
        paged_attention(*case(), Mask(), scale=1.0, kernel="page")
    with pytest.raises(UserError, match="server.kernel: pallas cannot do this layer: it knows causal masks only"):
        paged_attention(*case(), Mask(dilation=2), scale=1.0, kernel="pallas")


@pytest.mark.parametrize(("platform", "target", "call"), TARGETS)
def test_the_kernels_lower_for_machines_that_are_not_here(platform, target, call):
    b, g, t, k, size, pages = 2, 2, 1, 128, 16, 32
    pool = jax.ShapeDtypeStruct((9, g, size, k), jnp.bfloat16)
    ints = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
    query = jax.ShapeDtypeStruct((b, t, 4 * g, k), jnp.bfloat16)
    decode = functools.partial(paged_decode, scale=1.0, platform=platform, interpret=False)
    assert call in lowered(decode, platform, target, query, pool, pool, ints((b, pages)), ints((b, t)), ints((b, t)))


@pytest.mark.parametrize("backend", ["cpu", "gpu"])
@pytest.mark.parametrize("shape, axis", [((5, 4, 3), 1), ((5, 2, 4, 3), 2), ((5, 2, 3, 4), 3)])
def test_pages_side_by_side_are_a_row_whatever_the_machine(monkeypatch, backend, shape, axis):
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    pool, table = np.random.default_rng(0).standard_normal(shape).astype(np.float32), np.array([[3, 1, 4], [0, 3, 2]])
    want = np.stack([np.concatenate(list(pool[row]), axis=axis - 1) for row in table])
    np.testing.assert_array_equal(module.read_pages(jnp.asarray(pool), jnp.asarray(table, jnp.int32), axis), want)
