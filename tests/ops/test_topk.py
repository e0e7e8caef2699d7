"""The indexer's choice: blocks against one piece, ties, few visible keys, and no score matrix of a long input."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.cache import EMPTY
from jaxllm.ops.selection import FEW, Halves, bracket, largest, ordered, places
from jaxllm.ops.topk import index_scores, select, top_k_naive

B, T, S, H, K = 2, 13, 37, 2, 4


def integers(seed=0):
    """Small whole numbers: scores are exact whatever the order of their sums, and ties are everywhere."""
    rng = np.random.default_rng(seed)
    q, k = rng.integers(-1, 2, (B, T, H, K)), rng.integers(-1, 2, (B, S, K))
    w = rng.integers(-2, 3, (B, T, H))
    return tuple(jnp.asarray(x, jnp.float32) for x in (q, w, k))


def by_hand(q, w, k, reach, top_k, docs):
    """The equation, one query at a time, with a stable sort."""
    q, w, k = (np.asarray(x, np.float64) for x in (q, w, k))
    out = np.full((*reach.shape, top_k), EMPTY)
    for b in range(q.shape[0]):
        for t in range(q.shape[1]):
            score = sum(w[b, t, h] * np.maximum(k[b] @ q[b, t, h], 0) for h in range(q.shape[2]))
            seen = [s for s in range(k.shape[1]) if s < reach[b, t] and docs[0][b, t] == docs[1][b, s] > 0]
            best = sorted(seen, key=lambda s: -score[s])[:top_k]
            out[b, t, : len(best)] = best
    return out


def test_the_choice_is_that_of_the_equation_and_ties_go_to_the_earlier_key_in_every_shape_of_call():
    q, w, k = integers()
    reach = np.minimum(np.arange(T) * 3 + 1, S)[None] * np.ones(
        (B, 1), int
    )  # the first queries see fewer than top_k keys
    docs = np.where(np.arange(T) < 9, 1, 2)[None].repeat(B, 0), np.where(np.arange(S) < 20, 1, 2)[None].repeat(B, 0)
    docs[1][1, 30:] = 0  # padding
    want = by_hand(q, w, k, reach, 6, docs)
    pair = tuple(jnp.asarray(x, jnp.int32) for x in docs)
    names = "queries", "keys", "part", "direct", "heaped"
    at_once = ((T, S, S, 16, 10**6), (T, S, S, 16, 0))
    for blocks in (*at_once, (4, 8, 8, 0, 0), (5, 16, 6, 0, 0), (1, 7, 2, 0, 0), (4, 37, 16, 0, 0)):
        sizes = {"scale": 1.0, **dict(zip(names, blocks, strict=True))}
        call = jax.jit(
            lambda *x, docs, sizes=sizes: select(*x, 6, docs=docs, **sizes)
        )  # by itself each operation is a program
        got = call(q, w, k, jnp.asarray(reach), docs=pair)
        np.testing.assert_array_equal(np.sort(got, -1), np.sort(want, -1), err_msg=str(blocks))
    assert (want == EMPTY).any() and (np.asarray(index_scores(q, w, k, 1.0)) == 0).mean() > 0.2


def test_queries_that_see_nothing_choose_nothing_though_others_before_them_did():
    """The strip of scores goes from a block of queries to the next: padding inside a chunk, and a reach beyond the last key."""
    q, w, k = (abs(x[:1]) + 1 for x in integers())
    w = -w  # all scores below the 0 of a key that is none
    reach = jnp.array([[37] * 4 + [0] * 4 + [3] * 4 + [99]])
    docs = tuple(np.ones((1, n), int) for n in (T, S))
    want = by_hand(q, w, k, np.asarray(reach), 6, docs)
    for keys, part, direct in ((64, 32, 0), (64, 16, 0), (16, 16, 0), (64, 32, 16)):  # one tile, two, blocks; at once
        sizes = {"scale": 1.0, "queries": 4, "keys": keys, "part": part, "direct": direct, "heaped": 0}
        got = jax.jit(lambda *x, sizes=sizes: select(*x, 6, **sizes))(q, w, k, reach)
        np.testing.assert_array_equal(np.sort(got, -1), np.sort(want, -1), err_msg=str(sizes))


def test_a_zero_of_either_sign_is_one_zero():
    """Weight -1 on a head that relu silences gives -0.0; a sort would put it behind 0.0."""
    scores = jnp.array([[[-0.0, 0.0, -1.0, -0.0]]])
    np.testing.assert_array_equal(top_k_naive(scores, jnp.ones_like(scores, bool), 3), [[[0, 1, 3]]])


def test_what_fits_is_chosen_whole_and_without_scores():
    q, w, k = (x * jnp.nan for x in integers())
    reach = jnp.broadcast_to(jnp.arange(T), (B, T))
    got = np.asarray(select(q, w, k, reach, S, scale=1.0))
    for t in range(T):
        np.testing.assert_array_equal(got[0, t], [*range(t), *[EMPTY] * (S - t)])


def hard_rows(n, s, rng):
    """Rows of nothing, of fewer than k, of one value, of both zeros, of ties, and of huge and tiny numbers."""
    x = rng.integers(-3, 4, (n, s)).astype(np.float32) * 10.0 ** rng.integers(-38, 38, (n, s)).astype(np.float32)
    x[0], x[1, 3:], x[2], x[3] = -np.inf, -np.inf, 2.0, np.where(rng.random(s) < 0.5, -0.0, 0.0)
    x[4] = np.round(x[4])
    return x


def check_largest(x, got, k):
    for row, places_ in zip(x, np.asarray(got), strict=True):
        best = [i for i in np.argsort(-row, kind="stable")[:k] if row[i] > -np.inf]
        np.testing.assert_array_equal(places_[: len(best)], sorted(best))
        assert np.all(places_[len(best) :] >= len(row))


@pytest.mark.parametrize(("s", "k"), [(300, 17), (37, 37)])
def test_the_largest_by_threshold_are_the_first_of_a_stable_sort(s, k):
    x = hard_rows(6, s, np.random.default_rng(0))
    check_largest(x, jax.jit(lambda x: largest(ordered(x), k))(jnp.asarray(x)), k)


@pytest.mark.parametrize("tile", [64, 512])
def test_a_few_numbers_are_compared_and_many_searched_with_equal_results(tile):
    """Row by row, as rows that are looked at together take the same way: which way is said too."""
    rng = np.random.default_rng(1)
    k, s = 100, 512
    wide = rng.standard_normal(s)  # parted by their upper bits
    narrow = 1 + rng.random(s) * 2.0**-9  # one value of the upper bits: to be told apart by the lower
    tied = np.where(rng.random(s) < 0.1, 3.0, 1.0)  # more equals than are compared
    apart = rng.permutation(np.where(np.arange(s) < k, 5.0, 1.0)) + rng.random(
        s
    )  # k of them reach the first trial between
    sparse = np.where(rng.random(s) < 0.5, wide, -np.inf)
    x = np.stack([*hard_rows(5, s, rng), wide, narrow, tied, -narrow, sparse, apart])
    x = x.astype(np.float32)

    @jax.jit
    def choose(row):
        halves = Halves.of(ordered(row), tile)
        at = bracket(halves, k, FEW)
        return places(halves, k), at.done(k) | (at.reach - at.beyond <= FEW)

    few = []
    for row in x:
        got, is_few = choose(row[None])
        check_largest(row[None], got, k)
        few.append(bool(is_few[0, 0]))
    assert few == [True, True, False, False, True, True, False, False, False, True, True]


def test_tiles_that_hold_nothing_yet_are_not_looked_at():
    """Numbers of an earlier block stand there."""
    x = np.random.default_rng(2).standard_normal((3, 256)).astype(np.float32)
    halves = dataclasses.replace(Halves.of(ordered(jnp.asarray(x)), 64), count=jnp.int32(2))
    got = jax.jit(lambda h: places(h, 10))(halves)
    check_largest(x[:, :128], got, 10)


def biggest(jaxpr):
    sizes = [v.aval.size for eqn in jaxpr.eqns for v in eqn.outvars if hasattr(v.aval, "size")]
    for eqn in jaxpr.eqns:
        for value in eqn.params.values():
            for inner in value if isinstance(value, (tuple, list)) else (value,):
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    sizes.append(biggest(inner))
    return max(sizes, default=0)


@pytest.mark.parametrize("t", [1 << 14, 1 << 17])
def test_a_long_input_has_no_score_matrix(t):
    """Nothing larger than the inputs, the choice, or one block's heads exists: 2^17 tokens would have 2^34 scores."""
    shapes = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((1, t, 16, 64), (1, t, 16), (1, t, 64))]
    reach = jax.ShapeDtypeStruct((1, t), jnp.int32)
    jaxpr = jax.make_jaxpr(lambda q, w, k, r: select(q, w, k, r, 512, scale=1.0))(*shapes, reach)
    assert biggest(jaxpr.jaxpr) <= t * 16 * 64
