"""The engine on a tiny model: a request's tokens are its own, whatever happens around it, and nothing is lost or traced again."""

import functools

import jax
import numpy as np
import pytest
from engines import LENGTH, ROWS, as_new, made, model_and_params, tokenizer

from jaxllm.errors import UserError
from jaxllm.inference.engine import Engine, QueueFull
from jaxllm.inference.requests import State
from jaxllm.inference.sampling import GREEDY, SamplingParams
from jaxllm.inference.settings import EngineSettings
from jaxllm.layers.base import Context
from jaxllm.layers.gqa import GQA
from jaxllm.layers.kda import KDA
from jaxllm.layers.mlp import MLP
from jaxllm.model import LanguageModel
from jaxllm.params import init_params


@pytest.fixture(scope="module", autouse=True)
def fresh():
    """Warmed up in this file, so that nothing that files before it in the process did counts."""
    made.cache_clear()


@pytest.fixture
def engine():
    """One engine for all tests, so that every shape is compiled once; it must be left as it was found."""
    engine = as_new(made())
    traces = engine.runner.traces
    yield engine
    assert engine.runner.traces == traces, "a shape was traced after the warm-up"
    assert not engine.busy
    assert engine.places.free_slots == ROWS and engine.places.free_pages == engine.places.pool.total


def test_what_is_compiled_while_requests_wait_is_said_with_its_reason(monkeypatch):
    runner, lines = made().runner, []
    monkeypatch.setattr(runner, "traces", runner.traces)
    monkeypatch.setattr(runner, "_log", lines.append)
    batch = runner.batch(1, runner.sizes.tokens[-1], runner.sizes.widths[0])
    args = runner.weights, runner.cache, runner.drawer.ids
    runner._forward.lower(*args, batch)  # a shape of the warm-up: traced before, so nothing is said
    odd = batch.replace(tokens=np.zeros((1, runner.sizes.tokens[-1] + 1), np.int32))
    runner._forward.lower(*args, odd)
    (line,) = lines
    assert line.startswith("engine, forward: compiled again") and "tokens" in line
    assert f"int32[1,{runner.sizes.tokens[-1]}] -> int32[1,{runner.sizes.tokens[-1] + 1}]" in line


def jobs(count=6, seed=0, **fields):
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(0, 256, rng.integers(1, 20)).tolist() for _ in range(count)]
    params = [
        SamplingParams(temperature=1.0, seed=int(i), max_tokens=int(rng.integers(2, 20)), ignore_eos=True, **fields)
        for i in range(count)
    ]
    return prompts, params


@functools.cache
def expected(seed=0):
    """Each request alone, one after another."""
    engine = made()
    return [engine.generate([p], s)[0].tokens for p, s in zip(*jobs(seed=seed), strict=True)]


CHANGES = {
    "together": {},
    "chunk_of_1": {"chunk": 1},
    "chunk_of_3": {"chunk": 3},
    "no_prefix_cache": {"prefix_cache": False},
    "optimistic": {"policy": "optimistic"},
    "small_pool": {"policy": "optimistic", "pages": 12},
    "preempted": {"preempt_every": 3},
    "preempted_at_once": {"preempt_every": 1, "chunk": 5},
    "no_overlap": {"overlap": False},
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_request_gets_the_same_tokens_in_any_company(engine, name):
    want = expected()
    engine.arrange(**CHANGES[name])
    got = engine.generate(*jobs())
    assert [a.tokens for a in got] == want
    again = engine.generate(*jobs())  # and with its prefix in the cache
    assert [a.tokens for a in again] == want
    if name == "together":
        assert sum(a.cached for a in again) > 0
    if name in ("preempted", "preempted_at_once", "small_pool"):
        assert engine.scheduler.preemptions > 0
    engine.check_places()


def test_prompts_of_like_length_go_through_the_model_together(engine, monkeypatch):
    prompts = [[7, 8, 9, i] for i in range(3)] + [list(range(12)), [5]]
    params = [SamplingParams(seed=i, max_tokens=3, ignore_eos=True) for i in range(5)]
    alone = [engine.generate([p], s)[0].tokens for p, s in zip(prompts, params, strict=True)]
    engine.arrange(prefix_cache=False)
    shapes, forward = [], engine.runner.forward
    monkeypatch.setattr(engine.runner, "forward", lambda batch: (shapes.append(batch.tokens.shape), forward(batch))[1])
    assert [a.tokens for a in engine.generate(prompts, params)] == alone
    assert shapes[:2] == [(4, 4), (1, 16)]  # three of four tokens in one call of four rows, and the long one by itself


def test_tokens_are_those_of_whole_sequences(engine):
    """Greedy, against the full forward of everything so far."""
    model, params = model_and_params()
    whole = jax.jit(lambda tokens: model.apply({"params": params}, Context.whole(tokens, tokens >= 0))[1].logits)
    prompt = list(range(40, 53))
    got = engine.generate([prompt], GREEDY._replace(max_tokens=12, ignore_eos=True, logprobs=2, prompt_logprobs=1))[0]
    text = np.full((1, LENGTH), -1, np.int32)
    text[0, : len(prompt) + 12] = prompt + got.tokens
    logits = np.asarray(whole(np.maximum(text, 0)))[0, :, : tokenizer().vocab_size]
    law = (
        logits
        - np.log(np.exp(logits - logits.max(-1, keepdims=True)).sum(-1, keepdims=True))
        - logits.max(-1, keepdims=True)
    )
    assert got.tokens == law[12:24].argmax(-1).tolist()
    np.testing.assert_allclose(got.logprobs, law[12:24].max(-1), atol=1e-4)
    for i, table in enumerate(got.top):
        np.testing.assert_allclose(sorted(table.values()), np.sort(law[12 + i])[-2:], atol=1e-4)
        assert got.logprobs[i] == table[got.tokens[i]]  # the very same float, as clients compare them
    want = [law[i - 1, prompt[i]] for i in range(1, 13)]
    assert got.prompt_logprobs[0] is None and got.prompt_top[0] is None
    np.testing.assert_allclose(got.prompt_logprobs[1:], want, atol=1e-4)
    warm = engine.generate([prompt], GREEDY._replace(max_tokens=12, ignore_eos=True, prompt_logprobs=1))[0]
    assert warm.prompt_logprobs == got.prompt_logprobs and warm.cached == 0
    scored = GREEDY._replace(max_tokens=0, prompt_logprobs=1)
    long = list(range(LENGTH))  # nothing is drawn, so a prompt may fill the context
    only, full = engine.generate([prompt, long], scored)
    assert (only.tokens, only.finish, only.prompt_logprobs) == ([], "length", got.prompt_logprobs)
    assert len(full.prompt_logprobs) == LENGTH
    with pytest.raises(UserError, match="max_tokens=0: must be at least 1"):
        engine.submit(prompt, GREEDY._replace(max_tokens=0))


@pytest.mark.parametrize(("length", "cached"), [(3, 0), (4, 0), (5, 4), (8, 4)])
def test_a_prompt_that_is_all_cached_still_computes_a_token(engine, length, cached):
    prompt = list(range(length))
    params = SamplingParams(seed=3, max_tokens=5, ignore_eos=True)
    cold, warm = engine.generate([prompt], params)[0], engine.generate([prompt], params)[0]
    assert (cold.cached, warm.cached) == (0, cached) and cold.tokens == warm.tokens
    a, b = engine.generate([prompt, prompt], params)
    assert a.tokens == b.tokens == cold.tokens


def test_a_salt_shares_nothing(engine):
    prompt, params = list(range(20)), SamplingParams(max_tokens=1)

    def cached(**kwargs):
        (request,) = engine.submit(prompt, params, **kwargs)
        while request.state is not State.DONE:
            engine.step()
        return request.cached

    assert [cached(), cached(), cached(salt="a"), cached(salt="a"), cached(salt="b")] == [0, 16, 0, 16, 0]
    while engine.busy:
        engine.step()


def test_n_answers_are_those_of_as_many_requests(engine):
    prompt = list(range(30, 40))
    params = SamplingParams(seed=7, max_tokens=8, ignore_eos=True)
    family = engine.generate([prompt], params._replace(n=4))
    assert [a.index for a in family] == [0, 1, 2, 3] and len({tuple(a.tokens) for a in family}) == 4
    assert [a.cached for a in family] == [0, 9, 9, 9]
    alone = [engine.generate([prompt], params._replace(seed=7 + i))[0] for i in range(4)]
    assert [a.tokens for a in family] == [a.tokens for a in alone]
    unseeded = [tuple(a.tokens) for a in engine.generate([prompt] * 4, params._replace(seed=None))]
    assert len(set(unseeded)) > 1


def test_penalties_count_what_the_row_has_written_and_nothing_else(engine):
    """With batch mates that come and go, after preemption, and on top of another row's slot."""
    prompt = [5, 6, 7, 5, 6, 7]
    strong = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True, frequency_penalty=90.0)
    alone = engine.generate([prompt], strong)[0].tokens
    assert len(set(alone)) == 20  # no id twice
    plain = engine.generate([prompt], GREEDY._replace(max_tokens=20, ignore_eos=True))[0].tokens
    assert len(set(plain)) < 20
    mates = jobs(7, seed=5)
    for change in ({}, {"preempt_every": 2}):
        engine.arrange(**change)
        got = engine.generate([*mates[0][:3], prompt, *mates[0][3:]], [*mates[1][:3], strong, *mates[1][3:]])
        assert got[3].tokens == alone
    biased = GREEDY._replace(max_tokens=3, logit_bias=((65, 1e4),), ignore_eos=True)
    assert engine.generate([prompt], biased)[0].text == "AAA"


def test_a_row_ends_where_it_should(engine):
    prompt = list(range(60, 70))
    free = SamplingParams(seed=2, max_tokens=12, ignore_eos=True)
    tokens = engine.generate([prompt], free)[0].tokens
    third = tokens[2]
    assert third not in tokens[:2]
    stop = engine.generate([prompt], free._replace(stop_token_ids=(third,)))[0]
    assert stop.tokens == tokens[:3] and stop.finish == "stop"
    late = engine.generate([prompt], free._replace(stop_token_ids=(third,), min_tokens=5))[0]
    assert third not in late.tokens[:5] and len(late.tokens) >= 5
    one = engine.generate([prompt], free._replace(max_tokens=1))[0]
    assert one.tokens == tokens[:1] and one.finish == "length"
    to_z = GREEDY._replace(max_tokens=6, logit_bias=((90, 1e4),))
    stopped = engine.generate([prompt], to_z._replace(stop=("ZZZ",)))[0]
    assert (stopped.text, stopped.finish, len(stopped.tokens)) == ("", "stop", 3)
    assert engine.generate([prompt], to_z._replace(stop=("ZY",)))[0].text == "ZZZZZZ"
    eos = tokenizer().eos_id
    ended = engine.generate([prompt], GREEDY._replace(max_tokens=6, logit_bias=((eos, 1e4),)))[0]
    assert (ended.text, ended.finish, ended.tokens) == ("", "stop", [eos])


@pytest.mark.parametrize("steps", [0, 1, 2, 5])
def test_an_abort_gives_everything_back_and_disturbs_nobody(engine, steps):
    prompts, params = jobs()
    gone = engine.submit(list(range(20)), SamplingParams(max_tokens=28, ignore_eos=True, n=2))
    rest = [engine.submit(p, s)[0] for p, s in zip(prompts, params, strict=True)]
    finished = []
    for _ in range(steps):
        finished += engine.step()
    for request in gone * 2:
        engine.abort(request)
    while engine.busy:
        finished += engine.step()
    assert [r.outputs for r in rest] == expected()
    assert [e.finish for e in finished if e.request in gone and e.finish] == ["abort"] * 2
    assert all(r.state is State.DONE for r in gone)
    continued = engine.generate(
        [list(range(20)) + gone[0].outputs], SamplingParams(seed=0, max_tokens=4, ignore_eos=True)
    )[0]
    engine.arrange(prefix_cache=False)
    cold = engine.generate([list(range(20)) + gone[0].outputs], SamplingParams(seed=0, max_tokens=4, ignore_eos=True))[
        0
    ]
    assert continued.tokens == cold.tokens


def test_a_failed_step_ends_its_requests_and_the_next_ones_are_served(engine, monkeypatch):
    want = expected()
    prompts, params = jobs()
    running = engine.submit(prompts[0], params[0])[0]
    engine.step()
    draw = engine.runner.draw

    def broken(*args):
        draw(*args)
        raise RuntimeError("the device is gone")

    monkeypatch.setattr(engine.runner, "draw", broken)
    events = engine.step()
    monkeypatch.undo()
    assert [(e.request, e.finish) for e in events] == [(running, "error")]
    assert "the device is gone" in running.error
    assert [a.tokens for a in engine.generate(prompts, params)] == want


def test_what_could_never_be_served_is_refused_at_once(engine):
    for prompt, params, match in (
        ([], GREEDY, "no tokens"),
        ([300], GREEDY, "outside the vocabulary"),
        ([1] * 56, GREEDY._replace(max_tokens=9), "do not fit the longest sequence, 64"),
        ([1], GREEDY._replace(temperature=-1.0), "temperature"),
        ([1], GREEDY._replace(stop_token_ids=(999,)), "stop_token_ids"),
        ([1], GREEDY._replace(logit_bias=((9999, 1.0),)), "logit_bias"),
        ([1], GREEDY._replace(n=17), "n=17"),
    ):
        with pytest.raises(UserError, match=match):
            engine.submit(prompt, params)
    engine.arrange(pages=5)
    with pytest.raises(UserError, match="need 8 pages, the whole cache has 5"):
        engine.submit([1] * 20, GREEDY._replace(max_tokens=12))
    engine.arrange(queue=2)
    asked = [engine.submit([1, 2], GREEDY._replace(max_tokens=2))[0] for _ in range(2)]
    with pytest.raises(QueueFull):
        engine.submit([1], GREEDY._replace(max_tokens=2))
    while engine.busy:
        engine.step()
    assert all(r.finish == "length" for r in asked)


def test_no_shape_is_traced_over_200_random_requests(engine):
    rng = np.random.default_rng(3)
    prompts = [rng.integers(0, 256, rng.integers(1, 30)).tolist() for _ in range(200)]
    params = [
        SamplingParams(
            temperature=float(rng.choice([0.0, 1.0])),
            top_k=int(rng.choice([0, 5])),
            top_p=float(rng.choice([1.0, 0.9])),
            seed=int(rng.integers(2**40)),
            repetition_penalty=float(rng.choice([1.0, 1.3])),
            max_tokens=int(rng.integers(1, 6)),
            logprobs=rng.choice([None, 0, 3]),
        )
        for _ in prompts
    ]
    got = engine.generate(prompts, params)
    assert len(got) == 200 and all(1 <= len(a.tokens) <= 5 for a in got)
    engine.check_places()  # the fixture asserts that nothing was traced


def test_contiguous_caches_give_the_same_tokens():
    model, params = model_and_params()
    settings = EngineSettings(
        cache="contiguous", rows=3, max_len=LENGTH, step_tokens=24, chunk=16, token_buckets=[16], prompt_logprobs=False
    )
    engine = Engine(model, params, tokenizer(), settings)
    assert [a.tokens for a in engine.generate(*jobs())] == expected()
    assert engine.places.free_slots == 3


def test_a_model_with_states_reuses_a_prefix_by_copies_of_them():
    """Recurrent layers and rings of windows: the state after the prefix is that of a cold run, whatever else happened."""
    model = LanguageModel(
        vocab_size=258,
        d_model=32,
        layers="linear/dense local/dense",
        mixers={
            "linear": functools.partial(KDA, num_heads=2, head_dim=16),
            "local": functools.partial(GQA, num_heads=2, window=6),
        },
        ffns={"dense": functools.partial(MLP, d_ff=32)},
        max_seq_len=40,
    )
    params = jax.tree.map(lambda leaf: leaf * 2, init_params(model, jax.random.key(1)))
    shapes = {"row_buckets": [2], "token_buckets": [8], "width_buckets": [10], "prompt_logprobs": False}
    settings = EngineSettings(rows=2, max_len=40, page_size=4, step_tokens=12, chunk=8, snapshots=3, **shapes)
    engine = Engine(model, params, tokenizer(), settings)
    free = SamplingParams(seed=4, max_tokens=8, ignore_eos=True)
    prompts = [list(range(17)), [*range(8), 99, 98], list(range(50, 70))]
    engine.arrange(prefix_cache=False)
    cold = [engine.generate([p], free)[0].tokens for p in prompts]
    engine.arrange(prefix_cache=True)
    first = engine.generate(prompts[:1], free)[0]
    warm = engine.generate([prompts[1], prompts[0], prompts[2]], free)
    assert (first.cached, [a.cached for a in warm]) == (0, [8, 16, 0])
    assert [first.tokens, *[a.tokens for a in warm]] == [cold[0], cold[1], cold[0], cold[2]]
    engine.arrange(preempt_every=3)
    assert [a.tokens for a in engine.generate([*prompts, prompts[0]], free)] == [*cold, cold[0]]
    engine.check_places()
    engine.runner.reset()
    engine.places.reset()  # what a failed step does
    assert engine.generate(prompts[:1], free)[0].cached == 0


def test_a_burst_of_64_prompts_into_4_rows(engine):
    rng = np.random.default_rng(9)
    prompts = [rng.integers(0, 256, 3).tolist() for _ in range(64)]
    params = [SamplingParams(seed=i, max_tokens=1 + i % 3, ignore_eos=True) for i in range(64)]
    together = engine.generate(prompts, params)
    engine.arrange(overlap=False)
    assert [a.tokens for a in engine.generate(prompts, params)] == [a.tokens for a in together]
