"""The scheduler without a device: a page memory that records who wrote what, and a model that is a hash of all it can see."""

import dataclasses
import hashlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxllm.inference.blocks import Identity
from jaxllm.inference.paging import Places
from jaxllm.inference.requests import Request, State
from jaxllm.inference.sampling import SamplingParams
from jaxllm.inference.scheduler import Scheduler


class FakeDevice:
    """Runs plans: writes tokens into pages, and draws a token from what the row's pages hold. Results come one step late, or at once."""

    def __init__(self, scheduler, late=True):
        self.scheduler, self.late = scheduler, late
        self.pages = {}
        self.states = {}  # slot -> all tokens that a recurrent layer has been given, where there is one
        self.flying = []
        self.steps = 0

    def step(self):
        plan = self.scheduler.plan()
        self.steps += 1
        for _, source, target in plan.copied:
            self.pages[target] = dict(self.pages.get(source, {}))
        for _, source, target in plan.restored:
            self.states[target] = self.states[source]
        drawn = []
        for request in plan.decodes:
            drawn.append(self.compute(request, request.computed - 1, 1))
        for chunk in plan.chunks:
            result = self.compute(chunk.request, chunk.start, chunk.count)
            drawn += [result] if chunk.last else []
        for _, source, target in plan.saved:
            self.states[target] = self.states[source]
        budget = self.scheduler.budget
        assert plan.tokens <= budget
        self.flying.append(drawn)
        if not self.late or len(self.flying) > 1 or not plan:
            self.take()
        self.check()
        return plan

    def compute(self, request, start, count):
        size = self.scheduler.places.page_size
        text = self.text(request)
        for t in range(start, start + count):
            page = request.place.pages[t // size]
            assert self.scheduler.places.pool.refs[page] == 1, "a shared page is written"
            self.pages.setdefault(page, {})[t % size] = text[t]
        if self.scheduler.places.snapshots is not None:  # a state goes on from where it was, or from nothing
            assert not start or self.states[request.place.slot] == tuple(text[t] for t in range(start))
            self.states[request.place.slot] = tuple(text[t] for t in range(start + count))
        seen = [self.pages[request.place.pages[t // size]][t % size] for t in range(start + count)]
        token = hashlib.sha256(repr((request.seed, seen)).encode()).digest()[0] % 4
        self.device_tokens(request)[start + count] = token
        return request, request.epoch, token

    def device_tokens(self, request):
        return request.__dict__.setdefault("on_device", {})

    def text(self, request):
        known = dict(enumerate(request.tokens))
        return {**self.device_tokens(request), **known}

    def take(self):
        for request, epoch, token in self.flying.pop(0):
            if request.state is not State.RUNNING or request.epoch != epoch:
                continue
            request.tokens.append(token)
            request.drawn -= 1
            self.scheduler.places.computed(request.place, request.tokens, min(request.computed, len(request.tokens)))
            if len(request.tokens) >= request.limit or token in request.stops:
                self.scheduler.remove(request)

    def check(self):
        self.scheduler.places.check([(r.place, r.computed) for r in self.scheduler.running if r.computed])

    def run(self, requests, most=2000):
        for request in requests:
            self.scheduler.add(request)
        while any(r.state is not State.DONE for r in requests):
            self.step()
            assert self.steps < most, "it spins"
        while self.flying:
            self.take()
        return [r.outputs for r in requests]


def scheduler(pages=64, size=4, rows=4, budget=16, chunk=8, snapshots=None, **kwargs):
    if snapshots is not None:
        kwargs["forks"] = False
    return Scheduler(Places(pages, size, rows, snapshots=snapshots), budget=budget, chunk=chunk, **kwargs)


def request(prompt, new, seed=0, **kwargs):
    return Request(prompt, SamplingParams(max_tokens=new), seed, Identity(), **kwargs)


def alone(prompt, new, seed):
    return FakeDevice(scheduler()).run([request(prompt, new, seed)])[0]


prompts = st.tuples(st.lists(st.integers(0, 3), min_size=1, max_size=14), st.integers(1, 10), st.integers(0, 3))


@settings(max_examples=80, deadline=None)
@given(
    jobs=st.lists(prompts, min_size=1, max_size=8),
    policy=st.sampled_from(["reserve", "optimistic"]),
    pages=st.integers(8, 20),
    chunk=st.sampled_from([1, 2, 3, 5, 8]),
    late=st.booleans(),
    every=st.sampled_from([None, None, 3, 7]),
    snapshots=st.sampled_from([None, None, 1, 3]),
)
def test_every_request_gets_the_tokens_it_gets_alone(jobs, policy, pages, chunk, late, every, snapshots):
    """Of models with states too: the device above asserts that each state is that of the tokens before it."""
    s = scheduler(pages=pages, chunk=chunk, policy=policy, preempt_every=every, snapshots=snapshots)
    outputs = FakeDevice(s, late).run([request(*job) for job in jobs])
    assert outputs == [alone(*job) for job in jobs]
    if policy == "reserve" and every is None:
        assert s.preemptions == 0
    assert s.places.free_pages == pages - 1 and s.places.free_slots == 4 and not s.running and not s.waiting


@pytest.mark.parametrize("policy", ["reserve", "optimistic"])
def test_answers_to_one_prompt_share_its_pages(policy):
    prompt = [0, 1, 2, 3, 0, 1, 2, 3, 1, 1]
    s = scheduler(policy=policy, budget=40, chunk=32)
    device = FakeDevice(s)
    elder = request(prompt, 6, 5)
    family = [elder, *[request(prompt, 6, 5 + i, elder=elder, index=i) for i in range(1, 4)]]
    outputs = device.run(family)
    assert outputs == [alone(prompt, 6, 5 + i) for i in range(4)]
    assert [r.cached for r in family] == [0, 9, 9, 9]  # all but the last token
    assert len({tuple(o) for o in outputs}) > 1


def test_states_are_copied_at_borders_and_the_longest_unused_copy_goes_first():
    s = scheduler(snapshots=2, rows=2, chunk=8)
    device = FakeDevice(s)
    first, second, third = ([i] * 13 for i in range(3))

    def cached(prompt):
        one = request(prompt, 2)
        device.run([one])
        return one.cached

    assert [cached(first), cached(first)] == [
        0,
        12,
    ]  # copies after 8 tokens and after 12, the last border before its last token
    assert cached(first[:9] + [3]) == 8  # a prompt that goes on differently
    assert cached(first[:6]) == 0  # pages alone are no use
    assert s.places.cut(0, 12, 12) == 8  # the last border before the last token, not the one behind it
    # The second prompt takes the copy that was used longest ago, and for its own later border its own earlier one.
    assert [cached(second), cached(first)] == [0, 4] and cached(third) == 0
    assert [s.places.cut(0, 8, 13), s.places.cut(8, 5, 13), s.places.cut(12, 1, 13), s.places.cut(0, 3, 13)] == [
        8,
        4,
        1,
        3,
    ]


def test_a_long_prompt_takes_the_place_of_its_own_earlier_copies_and_of_nobody_elses():
    """Five borders, two copies: the last two stay, and where another prompt has a copy, it and the last one."""
    s = scheduler(snapshots=2, rows=2, chunk=8, pages=40)
    device = FakeDevice(s)
    short, long = [1] * 9, [2] * 41

    def cached(prompt):
        one = request(prompt, 2)
        device.run([one])
        return one.cached

    assert [cached(short), cached(long)] == [0, 0]
    assert [cached(long), cached(short)] == [40, 8]


def test_a_small_pool_preempts_and_loses_nothing():
    jobs = [([i % 4] * 6, 20, i) for i in range(4)]
    s = scheduler(pages=9, policy="optimistic")
    device = FakeDevice(s)
    outputs = device.run([request(*job) for job in jobs])
    assert outputs == [alone(*job) for job in jobs]
    assert s.preemptions > 0 and s.places.free_pages == 8


def test_two_that_fit_alone_but_not_together_end_in_bounded_steps():
    jobs = [([0] * 10, 20, 0), ([1] * 10, 20, 1)]
    s = scheduler(pages=9, policy="optimistic")
    device = FakeDevice(s)
    assert device.run([request(*job) for job in jobs]) == [alone(*job) for job in jobs]
    sequential = sum(2 + new for _, new, _ in jobs)
    assert device.steps < 10 * sequential


def test_decoding_requests_get_a_token_every_step_while_a_long_prompt_comes_in():
    s = scheduler(pages=200, rows=4, budget=12, chunk=8)
    device = FakeDevice(s, late=False)
    for i in range(3):
        s.add(request([i], 40, i))
    device.step()
    late = request([3] * 80, 4)
    s.add(late)
    steps = 0
    while late.first is None and late.computed < 80:
        plan = device.step()
        assert len(plan.decodes) == 3
        assert plan.chunks[0].count == 8
        steps += 1
    assert steps == 10


def test_a_static_batch_waits_for_its_last_request():
    jobs = [([i], 10 if i in (0, 4) else 1, i) for i in range(8)]
    steps = {}
    for policy in ("static", "reserve"):
        device = FakeDevice(scheduler(policy=policy), late=False)
        outputs = device.run([request(*job) for job in jobs])
        assert outputs == [alone(*job) for job in jobs]
        steps[policy] = device.steps
    assert steps == {"static": 20, "reserve": 11}  # `ideal_ratio` of these lengths
    # A batch that takes several steps to come in is one batch all the same.
    device = FakeDevice(scheduler(policy="static", budget=6, chunk=4), late=False)
    device.run([request([i] * 4, 10, i) for i in range(4)])
    assert device.steps <= 15


def test_the_head_of_the_queue_is_not_overtaken():
    s = scheduler(pages=9, policy="reserve")
    device = FakeDevice(s)
    first, large, small = request([0] * 8, 12), request([1] * 16, 12), request([2], 2)
    device.scheduler.add(first)
    device.step()
    s.add(large)
    s.add(small)
    for _ in range(5):
        device.step()
    assert large.state is State.WAITING and small.state is State.WAITING
    device.run([])
    while small.state is not State.DONE:
        device.step()
        assert large.state is not State.WAITING or small.state is State.WAITING


@pytest.mark.parametrize("when", ["waiting", "chunking", "running", "done"])
def test_a_request_can_go_at_any_time(when):
    s = scheduler(rows=1, chunk=4, budget=8)
    device = FakeDevice(s)
    other, gone = request([1] * 5, 6), request([0] * 12, 6)
    s.add(gone)
    if when == "waiting":
        s.waiting.clear()
        s.add(other)
        device.step()
        s.add(gone)
    steps = {"waiting": 1, "chunking": 1, "running": 5, "done": 30}[when]
    for _ in range(steps):
        device.step()
    s.remove(gone)
    s.remove(gone)
    if when != "waiting":
        s.add(other)
    while other.state is not State.DONE:
        device.step()
    assert other.outputs == alone([1] * 5, 6, 0)
    assert s.places.free_slots == 1 and s.places.free_pages == 63


def test_scored_prompts_are_computed_whatever_is_cached():
    s = scheduler()
    device = FakeDevice(s)
    prompt = [0, 1, 2, 3, 1, 2, 3, 0, 1]
    device.run([request(prompt, 2)])
    scored = request(prompt, 2)
    scored.params = (
        dataclasses.replace(scored.params)
        if dataclasses.is_dataclass(scored.params)
        else scored.params._replace(prompt_logprobs=0)
    )
    again = request(prompt, 2)
    device.run([scored, again])
    assert scored.cached == 0 and again.cached == 8
    assert scored.outputs == again.outputs
