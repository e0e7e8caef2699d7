"""Sampling: edges of temperature, top-k, top-p and min-p, and the independence of a row's draws."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.errors import UserError
from jaxllm.inference import sampling
from jaxllm.inference.sampling import (
    History,
    Sampling,
    SamplingParams,
    Wishes,
    adjust,
    chosen_logprobs,
    filter_logits,
    keep,
    sample,
)

VOCAB, PADDED = 97, 128  # every test runs with a padded head whose extra ids would win if they could be drawn
SMALL, LARGE = 8, 4096  # two batch sizes for all tests, so that each function is compiled twice at most
traces = []


def counted_sample(logits, rows, at, vocab_size):
    traces.append(logits.shape)
    return sample(logits, rows, at, vocab_size)


compiled_sample = jax.jit(counted_sample, static_argnames="vocab_size")
compiled_filter = jax.jit(filter_logits)
compiled_keep = jax.jit(keep)


def padded(logits, fill=-np.inf):
    """[b v] -> [b VOCAB]: more ids, none of them possible."""
    logits = np.asarray(logits)
    return np.pad(logits, ((0, 0), (0, VOCAB - logits.shape[1])), constant_values=fill)


def draw(logits, params, at=5, size=SMALL):
    """ids and logprobs of len(params) rows, under debug_nans, through one compiled shape."""
    count = len(params)
    logits = padded(logits)
    logits = np.pad(logits, ((0, size - count), (0, 0)))
    logits = np.pad(logits, ((0, 0), (0, PADDED - VOCAB)), constant_values=50.0)
    at = np.pad(np.broadcast_to(np.asarray(at, np.int32), count), (0, size - count))
    rows = Sampling.rows([*params, *[SamplingParams()] * (size - count)])
    with jax.debug_nans(True):
        ids, logprobs = compiled_sample(logits, rows, at, vocab_size=VOCAB)
    return np.asarray(ids)[:count], np.asarray(logprobs)[:count]


def filtered(logits, params):
    """filter_logits of len(params) rows, cut back to the width of `logits`."""
    logits = np.asarray(logits)
    rows = Sampling.rows([*params, *[SamplingParams()] * (SMALL - len(params))])
    with jax.debug_nans(True):
        result = compiled_filter(np.pad(padded(logits), ((0, SMALL - len(params)), (0, 0))), rows)
    return np.asarray(result)[: len(params), : logits.shape[1]]


def kept(probabilities, top_k=0, top_p=1.0, min_p=0.0):
    """The ids that `keep` leaves of one law."""
    law = np.tile(padded(np.array([probabilities], np.float32), 0.0), (SMALL, 1))
    each = (np.full(SMALL, top_k, np.int32), np.full(SMALL, top_p, np.float32), np.full(SMALL, min_p, np.float32))
    return {int(i) for i in np.flatnonzero(np.asarray(compiled_keep(law, *each))[0, : len(probabilities)])}


def frequencies(logits, params):
    """Shares of each id over LARGE positions of one seed."""
    logits = np.asarray(logits, np.float32)
    ids, _ = draw(np.tile(logits, (LARGE, 1)), [params] * LARGE, np.arange(LARGE), size=LARGE)
    return np.bincount(ids, minlength=len(logits)) / LARGE


def log_softmax(logits):
    return np.asarray(jax.nn.log_softmax(jnp.asarray(logits, jnp.float32)))


def test_zero_temperature_is_argmax_even_with_filters_and_seed():
    logits = [[1.0, 2.0], [2.0, 1.0]]
    ids, logprobs = draw(logits, [SamplingParams(0.0), SamplingParams(0.0, top_k=5, top_p=0.1, seed=9)])
    assert ids.tolist() == [1, 0]
    np.testing.assert_allclose(logprobs, log_softmax(logits)[[0, 1], ids], atol=1e-6)


def test_ties_go_to_the_lowest_id():
    ids, _ = draw([[0.0, 3.0, 3.0, 3.0]] * 3, [SamplingParams(0.0), SamplingParams(1.0, top_k=1), SamplingParams(1e-7)])
    assert ids.tolist() == [1, 1, 1]


def test_mixed_temperatures_in_one_call():
    count = LARGE // 3
    params = [SamplingParams(t) for _ in range(count) for t in (0.0, 1.0, 1e-7)]
    ids, logprobs = draw(np.tile([1.0, 2.0], (3 * count, 1)), params, np.repeat(np.arange(count), 3), size=LARGE)
    ids = ids.reshape(count, 3)
    assert (ids[:, 0] == 1).all() and (ids[:, 2] == 1).all()
    assert ids[:, 1].mean() == pytest.approx(1 / (1 + np.exp(-1)), abs=0.04)
    assert np.isfinite(logprobs).all()


def test_tiny_temperatures_are_safe():
    temperatures = [1e-45, 1e-30, 1e-7, 2e-6, 1e-3]
    logits = [[3e4, -3e4, 2.9e4, -np.inf]] * len(temperatures)
    ids, logprobs = draw(logits, [SamplingParams(t, 3, 0.9) for t in temperatures])
    assert (ids == 0).all() and np.isfinite(logprobs).all()


def test_draws_follow_the_tempered_law():
    logits = np.array([1.0, 0.0, -1.0, 2.0], np.float32)
    for temperature in (0.5, 1.0, 2.0):
        expected = np.exp(log_softmax(logits / temperature))
        assert np.abs(frequencies(logits, SamplingParams(temperature, seed=3)) - expected).max() < 0.03


@pytest.mark.parametrize(
    ("top_p", "expected"),
    [(0.8, {0, 1}), (0.5, {0}), (0.81, {0, 1, 2}), (1e-9, {0}), (0.0, {0}), (1.0, {0, 1, 2, 3})],
)
def test_top_p_edges(top_p, expected):
    assert kept([0.5, 0.3, 0.1, 0.1], top_p=top_p) == expected


def test_top_p_keeps_one_id_when_it_has_all_the_mass():
    assert kept([1.0, 0.0, 0.0, 0.0], top_p=0.9) == {0}
    logits = jnp.asarray([[-jnp.inf, 0.0, -jnp.inf, -1e30]], jnp.bfloat16)
    with jax.debug_nans(True):
        result = compiled_filter(logits, Sampling.rows([SamplingParams(top_p=0.9)]))
    assert np.isfinite(result).tolist() == [[False, True, False, False]]


def test_top_p_near_one_survives_low_precision():
    logits = jnp.log(jnp.asarray([[0.9, 0.0995, 0.0005, 0.0]])).astype(jnp.bfloat16)
    result = compiled_filter(logits, Sampling.rows([SamplingParams(top_p=1 - 1e-3)]))
    assert np.isfinite(result).tolist() == [[True, True, False, False]]


def test_open_filters_are_bit_identical_to_none():
    logits = np.random.default_rng(0).normal(size=(2, 50)).astype(np.float32) * 4
    plain = filtered(logits, [SamplingParams()] * 2)
    # The second row's filter forces the sorting branch; the first row is open and must not move.
    mixed = filtered(logits, [SamplingParams(), SamplingParams(top_k=3)])
    wide = filtered(logits, [SamplingParams(top_k=1000), SamplingParams(top_k=50)])
    assert (plain[0] == mixed[0]).all()
    assert (plain == wide).all()
    assert np.isfinite(mixed[1]).sum() == 3


def test_top_k_edges():
    law = [0.1, 0.4, 0.1, 0.4]
    assert kept(law, top_k=0) == {0, 1, 2, 3}
    assert kept(law, top_k=1) == {1}
    assert kept(law, top_k=3) == {0, 1, 3}
    assert kept(law, top_k=2**31 - 1) == {0, 1, 2, 3}
    assert Sampling.rows([SamplingParams(top_k=2**40)]).top_k.tolist() == [2**31 - 1]


def test_min_p_edges():
    law = [0.5, 0.25, 0.125, 0.125]
    assert kept(law, min_p=0.0) == {0, 1, 2, 3}
    assert kept(law, min_p=0.5) == {0, 1}
    assert kept(law, min_p=0.25) == {0, 1, 2, 3}
    assert kept(law, min_p=1.0) == {0}


def test_filters_act_in_the_documented_order():
    law = [0.4, 0.3, 0.2, 0.1]
    # After top-k 2 the law is [4/7, 3/7]: the mass before id 1 is .571, not .4, so p = .5 drops id 1.
    assert kept(law, top_p=0.5) == {0, 1}
    assert kept(law, top_k=2, top_p=0.5) == {0}
    # Temperature comes first: at T = 2 the same p needs more ids.
    logits = np.log([[0.81, 0.09, 0.09, 0.01]] * 2)
    result = filtered(logits, [SamplingParams(1.0, top_p=0.7), SamplingParams(2.0, top_p=0.7)])
    assert np.isfinite(result).sum(axis=1).tolist() == [1, 2]


def test_dropped_ids_are_never_drawn():
    shares = frequencies(np.log([0.4, 0.3, 0.2, 0.1]), SamplingParams(5.0, top_k=2))
    assert (shares[2:] == 0).all() and (shares[:2] > 0.3).all()


def test_padded_vocabulary_is_never_drawn_and_carries_no_mass():
    flat = np.zeros((LARGE, VOCAB))
    for start in range(0, 10_000, LARGE):
        ids, logprobs = draw(flat, [SamplingParams(100.0, seed=1)] * LARGE, start + np.arange(LARGE), size=LARGE)
        assert ids.max() < VOCAB
        np.testing.assert_allclose(logprobs, -np.log(VOCAB), atol=1e-5)


def test_rows_without_any_finite_logit():
    params = [SamplingParams(0.0), SamplingParams(1.0, top_k=2, top_p=0.5, min_p=0.1)]
    ids, logprobs = draw(np.full((2, 4), -np.inf), params)
    assert ids.tolist() == [0, 0]
    assert np.isneginf(logprobs).all()


def test_no_step_of_the_computation_makes_a_nan():
    # Compiled code is only searched for NaN in its results; op by op every intermediate value is searched.
    edges = jnp.asarray([[1.0, 2.0, -jnp.inf], [-jnp.inf] * 3, [3e38, -3e38, 0.0], [0.0, 0.0, 0.0]])
    cold = SamplingParams(1e-5, 1, 1e-9)
    params = [SamplingParams(0.0), SamplingParams(1.0, 2, 0.5, 0.1), cold, SamplingParams(1e-7)]
    with jax.debug_nans(True), jax.disable_jit():
        possible = np.isfinite(filter_logits(edges, Sampling.rows(params)))
        logprobs = chosen_logprobs(edges, jnp.array([1, 0, 0, 0]))
    assert possible.any(axis=1).tolist() == [True, False, True, True]
    np.testing.assert_allclose(logprobs, [log_softmax([1.0, 2.0])[1], -np.inf, 0.0, -np.log(3)], atol=1e-6)


def test_logprobs_ignore_temperature_and_filters():
    logits = np.random.default_rng(1).normal(size=(3, 20))
    params = [SamplingParams(2.0), SamplingParams(0.3, top_k=1), SamplingParams(1.0, top_p=0.2, min_p=0.5)]
    ids, logprobs = draw(logits, params)
    np.testing.assert_allclose(logprobs, log_softmax(logits)[np.arange(3), ids], atol=1e-6)


def test_nan_logits_show_in_the_logprob():
    logits = jnp.full((SMALL, PADDED), jnp.nan).at[1:].set(0.0)
    rows = Sampling.rows([SamplingParams(0.0)] * SMALL)
    _, logprobs = compiled_sample(logits, rows, np.zeros(SMALL, np.int32), vocab_size=VOCAB)
    assert np.isnan(logprobs).tolist() == [True] + [False] * (SMALL - 1)


def test_draws_do_not_depend_on_batch_mates():
    logits = np.random.default_rng(2).normal(size=(5, VOCAB))
    mates = [SamplingParams(1.0, seed=s) for s in (7, 8, 7, 9)]
    for mine in (SamplingParams(1.3, top_k=40, seed=2**63 + 7), SamplingParams(1.0, seed=7)):
        alone, _ = draw(logits[:1], [mine], 17)
        first, _ = draw(logits, [mine, *mates], [17, 3, 4, 5, 6])
        last, _ = draw(logits[::-1], [*mates, mine], [3, 4, 5, 6, 17])
        assert alone[0] == first[0] == last[4]


def test_seed_and_position_both_move_the_draw():
    flat = np.zeros((64, VOCAB))
    by_position, _ = draw(flat, [SamplingParams(seed=7)] * 64, np.arange(64), size=LARGE)
    by_seed, _ = draw(flat, [SamplingParams(seed=s << 32) for s in range(64)], 5, size=LARGE)
    assert len(set(by_position.tolist())) > 32 and len(set(by_seed.tolist())) > 32
    again, _ = draw(flat, [SamplingParams(seed=7)] * 64, np.arange(64), size=LARGE)
    assert by_position.tolist() == again.tolist()


def test_neighbouring_positions_are_independent():
    ids = []
    for start in range(0, 20_000, LARGE):
        at = start + np.arange(LARGE)
        ids.append(draw(np.zeros((LARGE, 2)), [SamplingParams(seed=7)] * LARGE, at, size=LARGE)[0])
    ids = np.concatenate(ids).astype(np.float64)
    assert abs(np.corrcoef(ids[:-1], ids[1:])[0, 1]) < 0.03


def test_parameters_are_traced_not_compiled_in():
    logits = np.random.default_rng(3).normal(size=(2, 8))
    draw(logits, [SamplingParams(0.0)] * 2)
    before = len(traces)
    for params in (SamplingParams(0.7, 3, 0.9, 0.1, 5), SamplingParams(2.0, seed=-1)):
        draw(logits, [params] * 2)
    assert len(traces) == before


@pytest.mark.parametrize(
    ("bad", "named"),
    [
        ({"temperature": -0.1}, "temperature=-0.1"),
        ({"temperature": float("nan")}, "temperature=nan"),
        ({"temperature": float("inf")}, "temperature=inf"),
        ({"top_p": 0.0}, "top_p=0.0"),
        ({"top_p": 1.5}, "top_p=1.5"),
        ({"top_p": float("nan")}, "top_p=nan"),
        ({"top_k": -1}, "top_k=-1"),
        ({"min_p": 1.1}, "min_p=1.1"),
    ],
)
def test_wrong_parameters_are_named(bad, named):
    with pytest.raises(UserError, match=named) as caught:
        SamplingParams(**bad).check()
    assert "\n" not in str(caught.value)


def test_good_parameters_pass():
    assert SamplingParams(0.0, 0, 1.0, 0.0, 3).check().seed == 3
    assert sampling.GREEDY.check().temperature == 0.0


def test_penalties_and_wishes_are_their_formulas():
    """Repetition divides what is above 0 and multiplies what is below; counts of the output alone; stops wait for their position."""
    none = SamplingParams()
    params = [
        none._replace(repetition_penalty=2.0),
        none._replace(presence_penalty=0.5, frequency_penalty=0.25),
        none._replace(min_tokens=3),
        none._replace(min_tokens=3),
    ]
    wishes = Wishes.rows(params, until=[0, 0, 10, 10], stops=[[], [], [2], [2]])
    history = History(
        counts=jnp.array([[0, 1, 0], [2, 0, 1], [0, 0, 0], [0, 0, 0]]),
        prompt=jnp.array([[True, False, False], [False, True, False], [False] * 3, [False] * 3]),
        bias=jnp.zeros((4, 3)).at[2, 0].set(7.0),
    )
    got = adjust(jnp.tile(jnp.array([2.0, -2.0, 1.0]), (4, 1)), history, wishes, jnp.array([0, 0, 9, 10]))
    want = [[1.0, -4.0, 1.0], [2 - 0.5 - 0.5, -2.0, 1 - 0.25 - 0.5], [9.0, -2.0, -np.inf], [2.0, -2.0, 1.0]]
    np.testing.assert_allclose(got, want, rtol=1e-6)
