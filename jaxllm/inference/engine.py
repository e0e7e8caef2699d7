"""Many requests through one model at once: the scheduler says what a step computes, the runner computes it, the engine tells who asked.

    engine = Engine(model, params, tokenizer)
    results = engine.generate(["def f", [1, 2, 3]], SamplingParams(temperature=0.7, max_tokens=64))

A turn of `step`: plan, dispatch, then read what the step *before* drew (`overlap`): the device computes while the host decides. The host
so learns one step late that a row has ended, and throws away the token that the row drew meanwhile.

A request's tokens are a function of the request alone: draws are keyed by its seed and the token's position (`sampling.py`), and no row
of a batch, no chunk, preemption or reused prefix changes what the model computes for another beyond rounding.
"""

import dataclasses
import itertools
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.data.vocabulary import Tokenizer
from jaxllm.errors import UserError
from jaxllm.inference.answers import Answer, Event, answer, table
from jaxllm.inference.blocks import Identity
from jaxllm.inference.layout import laid_out
from jaxllm.inference.paging import Places
from jaxllm.inference.requests import Request, State
from jaxllm.inference.runner import Batch, Runner
from jaxllm.inference.sampling import Sampling, SamplingParams, Wishes
from jaxllm.inference.scheduler import Chunk, Plan, Scheduler
from jaxllm.inference.settings import EngineSettings
from jaxllm.inference.sizes import bucket, sizes_of
from jaxllm.inference.texting import TextStream
from jaxllm.model import LanguageModel
from jaxllm.params import unstack


class QueueFull(UserError):
    """More requests wait than `server.queue` allows: try again later."""


@dataclass
class _Drawn:
    """Results in flight: of a draw, whose and at which epoch; or of a chunk whose tokens are scored."""

    requests: list[tuple[Request, int]]
    arrays: tuple[Any, ...]  # ids, logprobs, and the most likely ids and theirs where somebody asked
    scored: tuple[Chunk, int, Any] | None = None


class Engine:
    """Serves requests from one model. Not for many threads at once, `submit` and `abort` excepted.

    Args:
        model: as it was built; params: its parameters, stacked or not. tokenizer: None works on ids alone.
        name, weights: identity of what computes the cache: pages are reused only under equal ones.
        warm_up: compile every shape now, so that nothing is compiled while requests run; log: told if something is after all.
    """

    def __init__(
        self,
        model: LanguageModel,
        params: Mapping[str, Any],
        tokenizer: Tokenizer | None = None,
        settings: EngineSettings | None = None,
        *,
        name: str = "",
        weights: str = "",
        warm_up: bool = False,
        log: Callable[[str], None] | None = None,
    ):
        if jax.default_backend() == "cpu" and model.compute_dtype.itemsize < 4:
            model = model.clone(dtype="float32")
        self.model, self.tokenizer = model, tokenizer
        self.settings = settings = settings or EngineSettings()
        self.vocab_size = min(model.vocab_size, tokenizer.vocab_size) if tokenizer is not None else model.vocab_size
        self.eos = frozenset(() if tokenizer is None else tokenizer.stop_ids)
        self.sizes = sizes_of(model, settings)
        decoder = model.unrolled()
        flat = unstack(model, params) if model.scan else dict(params)
        prepared = laid_out(jax.tree.map(jnp.asarray, decoder.prepare(flat)), settings.rows)
        self.runner = Runner(decoder, prepared, self.sizes, self.vocab_size, settings.cache_dtype, settings.kernel, log)
        self.identity = Identity(name, weights, dtype=str(settings.cache_dtype or model.compute_dtype))
        self._arrange()
        self.steps = 0
        self.prefix_queries = self.prefix_hits = 0  # tokens
        self._flying: deque[list[_Drawn]] = deque()  # by step
        self._now: list[_Drawn] = []  # of the step that is being dispatched
        self._streams: dict[int, TextStream] = {}
        self._events: list[Event] = []
        self._inbox: deque[tuple[str, Request]] = deque()
        self._lock = threading.Lock()
        self._ids = itertools.count()
        if warm_up:
            self.runner.warm_up(settings.prompt_logprobs)

    def _arrange(self) -> None:
        s, sizes = self.settings, self.sizes
        pages = 0 if sizes.contiguous else min(sizes.pages, (s.pages or sizes.pages) + 1)
        shares = self.runner.shares
        first = 0 if sizes.contiguous else 1
        snapshots = None if shares else sizes.snapshots
        self.places = Places(
            pages, sizes.page_size, sizes.slots, reuse=s.prefix_cache, first_slot=first, snapshots=snapshots
        )
        self.scheduler = Scheduler(
            self.places,
            budget=s.step_tokens,
            chunk=min(s.chunk, sizes.tokens[-1]),
            policy=s.policy,
            forks=shares,
            preempt_every=s.preempt_every,
        )

    def arrange(self, **changes: Any) -> None:
        """Go on under other settings that need no new shapes (policy, step_tokens, chunk, prefix_cache, fewer pages, overlap), and
        with an empty cache. Nothing may be running."""
        assert not self.busy
        self.settings = dataclasses.replace(self.settings, **changes)
        self._arrange()

    # --- asking ---------------------------------------------------------------------------------------------------

    def encode(self, prompt: str | Sequence[int]) -> list[int]:
        """Ids of a prompt, which may be ids already."""
        if not isinstance(prompt, str):
            return [int(token) for token in prompt]
        if self.tokenizer is None:
            raise UserError("prompt: this model has no tokenizer; give token ids")
        return self.tokenizer.prompt(prompt) or [int(self.tokenizer.eos_id)]

    def check(self, prompt: Sequence[int], params: SamplingParams) -> None:
        """Refuse, before anything runs, what could never be served."""
        params.check()
        if not prompt:
            raise UserError("prompt: has no tokens; give at least one")
        for i, token in enumerate(prompt):
            if not 0 <= token < self.vocab_size:
                raise UserError(f"prompt[{i}]={token}: outside the vocabulary of {self.vocab_size} ids")
        for name, ids in (("logit_bias", [t for t, _ in params.logit_bias]), ("stop_token_ids", params.stop_token_ids)):
            for token in ids:
                if not 0 <= token < self.vocab_size:
                    raise UserError(f"{name}: {token} is outside the vocabulary of {self.vocab_size} ids")
        if params.stop and self.tokenizer is None:
            raise UserError("stop: this model has no tokenizer, so there is no text to stop at; give stop_token_ids")
        if params.prompt_logprobs is not None and not self.settings.prompt_logprobs:
            raise UserError("prompt_logprobs: this engine was started with server.prompt_logprobs=false")
        length = len(prompt) + params.max_tokens
        if length > self.sizes.length:
            raise UserError(
                f"prompt: {len(prompt)} tokens and max_tokens={params.max_tokens} do not fit the longest sequence, {self.sizes.length}"
            )
        pages = self.places.pages_for(max(length - 1, len(prompt)))
        if self.places.pool is not None and pages > self.places.pool.total:
            raise UserError(
                f"prompt: {len(prompt)} tokens and max_tokens={params.max_tokens} need {pages} pages,"
                f" the whole cache has {self.places.pool.total}"
            )

    def submit(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        *,
        id: str | None = None,
        salt: str = "",
        client: Any = None,
    ) -> list[Request]:
        """Queue a prompt; its `params.n` requests. Raises UserError for what could never be served, QueueFull when too many wait."""
        params = params or SamplingParams()
        ids = self.encode(prompt)
        self.check(ids, params)
        if len(self.scheduler.waiting) + len(self._inbox) + params.n > self.settings.queue:
            raise QueueFull(f"server.queue: {self.settings.queue} requests are waiting already; try again later")
        seed = secrets.randbits(63) if params.seed is None else params.seed
        stops = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self.eos)
        number = next(self._ids)
        requests: list[Request] = []
        for i in range(params.n):
            requests.append(
                Request(
                    ids,
                    params._replace(seed=seed + i),
                    seed + i,
                    dataclasses.replace(self.identity, salt=salt),
                    stops,
                    id=id or f"r{number}",
                    index=i,
                    elder=requests[0] if i else None,
                    client=client,
                )
            )
        self._inbox.extend(("add", request) for request in requests)
        return requests

    def abort(self, request: Request) -> None:
        """Nobody wants it any more; from any thread, at any time, any number of times."""
        self._inbox.append(("abort", request))

    @property
    def busy(self) -> bool:
        """Whether a step would do anything."""
        return bool(self._inbox or self.scheduler.waiting or self.scheduler.running or self._flying)

    # --- one turn -------------------------------------------------------------------------------------------------

    def step(self) -> list[Event]:
        """Plan and dispatch one step, and read the one before. A step that fails ends the requests it served, not the engine."""
        with self._lock:
            self._events = []
            self._read_inbox()
            try:
                plan = self.scheduler.plan()
                self._now = []
                self._dispatch(plan)
                if plan:
                    self._flying.append(self._now)
                while self._flying and (len(self._flying) > 1 or not plan or not self.settings.overlap):
                    for drawn in self._flying.popleft():
                        self._take(drawn)
            except Exception as error:
                self._recover(error)
            if not self.scheduler.running:
                self._flying.clear()  # what rows drew that have ended
            self.steps += 1
            return self._events

    def _read_inbox(self) -> None:
        while self._inbox:
            what, request = self._inbox.popleft()
            if what == "add":
                if request.state is State.WAITING:
                    self._streams[request.number] = TextStream(self.tokenizer, request.params.stop)
                    self.scheduler.add(request)
            elif request.state is not State.DONE:
                if request.number in self._streams:
                    self._end(request, "abort")
                else:  # it was never added
                    request.state, request.finish = State.DONE, "abort"

    def _recover(self, error: BaseException) -> None:
        """The step took donated pools with it: make them anew, end what ran, keep what waits."""
        self._flying.clear()
        message = f"{type(error).__name__}: {error}"
        for request in list(self.scheduler.running):
            request.error = message
            self._end(request, "error")
        self.places.reset()
        self.runner.reset()

    def _end(self, request: Request, finish: str) -> None:
        request.finish, request.ended = finish, time.monotonic()
        stream = self._streams.pop(request.number)
        self.scheduler.remove(request)
        self._events.append(Event(request, (), "" if finish == "error" else stream.finish(), finish))

    # --- dispatch -------------------------------------------------------------------------------------------------

    def _dispatch(self, plan: Plan) -> None:
        self.runner.copy([(source, target) for _, source, target in plan.copied])
        self.runner.copy_states([(source, target) for _, source, target in plan.restored])
        for request in plan.opened:
            self._opened(request)
        if plan.decodes:
            batch, order = self._decode_batch(plan.decodes)
            self._draw(self.runner.forward(batch), order)
        for chunks in self._calls(plan.chunks):
            self._compute(chunks)
        self.runner.copy_states([(source, target) for _, source, target in plan.saved])

    def _opened(self, request: Request) -> None:
        if not request.preemptions:
            request.started = time.monotonic()
            self.prefix_queries += len(request.prompt)
            self.prefix_hits += request.cached
        if request.params.remembers:
            assert request.place is not None
            self.runner.remember(request.place.slot, request.prompt, request.outputs, request.params.logit_bias)

    def _decode_batch(self, decodes: Sequence[Request]) -> tuple[Batch, list[Request | None]]:
        """One token of each; and who stands in which row. Contiguous caches: every slot is a row, idle ones included."""
        if self.sizes.contiguous:
            order: list[Request | None] = [None] * self.sizes.slots
            for request in decodes:
                assert request.place is not None
                order[request.place.slot] = request
            batch = self.runner.batch(self.sizes.slots, 1, 0)
            batch.slots[:] = np.arange(self.sizes.slots)
            for request in self.scheduler.running:  # a row between two chunks keeps its state only with its length
                assert request.place is not None
                batch.lengths[request.place.slot] = request.computed
        else:
            rows = bucket(self.sizes.rows, len(decodes))
            order = [*decodes, *[None] * (rows - len(decodes))]
            pages = max(len(r.place.pages) for r in decodes if r.place is not None)
            batch = self.runner.batch(rows, 1, self.runner.width(pages))
        for row, member in enumerate(order):
            if member is not None:
                self._fill(batch, row, member, member.computed - 1, 1)
        return batch, order

    def _fill(self, batch: Batch, row: int, request: Request, start: int, count: int) -> None:
        assert request.place is not None
        batch.lengths[row], batch.new[row], batch.slots[row] = start, count, request.place.slot
        known = request.tokens[start : start + count]
        batch.tokens[row, : len(known)] = known
        batch.held[row] = len(known) < count  # only ever the newest token is still on the device
        if not self.sizes.contiguous:
            pages = request.place.pages[: batch.table.shape[1]]
            batch.table[row, : len(pages)] = pages

    def _calls(self, chunks: Sequence[Chunk]) -> Iterator[list[Chunk]]:
        """Pieces of prompts that go through the model in one call: those of like length, as many as a call takes. Scored ones go alone."""
        alike: dict[int, list[Chunk]] = {}
        for chunk in chunks:
            if _scored(chunk):
                yield [chunk]
            else:
                alike.setdefault(bucket(self.sizes.tokens, chunk.count), []).append(chunk)
        for tokens, some in alike.items():
            most = self.sizes.together(tokens)
            yield from (some[i : i + most] for i in range(0, len(some), most))

    def _compute(self, chunks: Sequence[Chunk]) -> None:
        """One call on pieces of prompts, and with the last piece of any the first draw."""
        tokens = bucket(self.sizes.tokens, max(chunk.count for chunk in chunks))
        rows = 1 if len(chunks) == 1 else self.sizes.together(tokens)
        pages = max(self.places.pages_for(chunk.start + chunk.count) for chunk in chunks)
        batch = self.runner.batch(rows, tokens, self.runner.width(max(pages, 1)))
        for row, chunk in enumerate(chunks):
            self._fill(batch, row, chunk.request, chunk.start, chunk.count)
        if _scored(chunks[0]):
            logits = self._score(batch, chunks[0])
        else:
            logits = self.runner.forward(batch)
        if any(chunk.last for chunk in chunks):
            order = [chunk.request if chunk.last else None for chunk in chunks]
            self._draw(logits, [*order, *[None] * (rows - len(order))])

    def _score(self, batch: Batch, chunk: Chunk) -> Any:
        after = np.zeros_like(batch.tokens)
        follow = chunk.request.prompt[chunk.start + 1 : chunk.start + chunk.count + 1]
        after[0, : len(follow)] = follow
        logits, scores = self.runner.score(batch, after)
        self._now.append(_Drawn([], (), (chunk, chunk.request.epoch, scores)))
        return logits

    def _draw(self, logits: Any, order: Sequence[Request | None]) -> None:
        """Dispatch the draw of each row's next token."""
        filler = SamplingParams(temperature=0.0)
        params = [filler if r is None else r.params for r in order]
        rows = len(order)
        slots, positions, live = (np.zeros(rows, np.int32) for _ in range(3))
        until: list[int] = [0] * rows
        stops: list[Sequence[int]] = [()] * rows
        for row, request in enumerate(order):
            if request is None:
                continue
            assert request.place is not None
            slots[row], positions[row], live[row] = request.place.slot, request.computed, 1
            if request.params.min_tokens:
                until[row] = len(request.prompt) + request.params.min_tokens
                stops[row] = tuple(request.stops)
        wishes = Wishes.rows(params, until, stops)
        ids, logprobs = self.runner.draw(logits, slots, positions, live, Sampling.rows(params), wishes)
        arrays: tuple[Any, ...] = (ids, logprobs)
        if any(p.logprobs for p in params):
            arrays += self.runner.top(logits)
        for array in arrays:
            array.copy_to_host_async()
        members = [(r, r.epoch) if r is not None else (_NOBODY, 0) for r in order]
        self._now.append(_Drawn(members, arrays))

    # --- results --------------------------------------------------------------------------------------------------

    def _take(self, drawn: _Drawn) -> None:
        if drawn.scored is not None:
            self._take_scores(*drawn.scored)
            return
        ids, logprobs, *top = jax.device_get(drawn.arrays)
        for row, (request, epoch) in enumerate(drawn.requests):
            if request.state is not State.RUNNING or request.epoch != epoch:
                continue  # it has ended, or draws this token again after its preemption
            self._add(request, int(ids[row]), float(logprobs[row]), [part[row] for part in top])

    def _add(self, request: Request, token: int, logprob: float, top: Sequence[np.ndarray]) -> None:
        """One more token of a request, and its end if it is one."""
        request.tokens.append(token)
        request.drawn -= 1
        assert request.place is not None
        self.places.computed(request.place, request.tokens, min(request.computed, len(request.tokens)))
        if request.first is None:
            request.first = time.monotonic()
        if np.isnan(logprob):
            request.error = f"the model's logits at position {len(request.tokens) - 1} are not numbers: its weights hold NaN or infinity"
            self._end(request, "error")
            return
        if request.params.logprobs is not None:
            request.logprobs.append(logprob)
            request.top.append(table(top, request.params.logprobs))
        stream = self._streams[request.number]
        stopped = token in request.stops and request.written > request.params.min_tokens
        text = "" if stopped else stream.push(token, may_stop=request.written >= request.params.min_tokens)
        if stopped or stream.stopped is not None:
            finish: str | None = "stop"
        else:
            finish = "length" if len(request.tokens) >= request.limit else None
        start = request.written - 1
        if finish is None:
            self._events.append(Event(request, (token,), text, None, start))
            return
        request.finish, request.ended = finish, time.monotonic()
        text += stream.finish()
        del self._streams[request.number]
        self.scheduler.remove(request)
        self._events.append(Event(request, (token,), text, finish, start))

    def _take_scores(self, chunk: Chunk, epoch: int, scores: Any) -> None:
        """Log probabilities of a chunk's tokens of the prompt: those at `start + 1 .. start + count`; the first token has none."""
        request = chunk.request
        if request.state is not State.RUNNING or request.epoch != epoch:
            return
        scored, ids, values = jax.device_get(scores)
        if chunk.start == 0:
            request.prompt_logprobs, request.prompt_top = [None], [None]
        count = min(chunk.count, len(request.prompt) - 1 - chunk.start)
        wanted = request.params.prompt_logprobs or 0
        for i in range(count):
            request.prompt_logprobs.append(float(scored[i]))
            request.prompt_top.append(table((ids[i], values[i]), wanted))
        if request.params.max_tokens == 0 and len(request.prompt_logprobs) == len(request.prompt):
            self._end(request, "length")  # nothing is to be drawn

    # --- plain calls ----------------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Sequence[str | Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        on_event: Callable[[Event], None] | None = None,
    ) -> list[Answer]:
        """Answers to all prompts, in order; n of them for a prompt with `n`. Row by row the same as if each had been asked alone.

        params: for all prompts, or one for each. All prompts are checked before the first one runs.
        """
        each = (
            list(params)
            if params is not None and not isinstance(params, SamplingParams)
            else [params or SamplingParams()] * len(prompts)
        )
        if len(each) != len(prompts):
            raise ValueError(f"{len(each)} sampling parameters for {len(prompts)} prompts")
        ids = [self.encode(prompt) for prompt in prompts]
        for i, (prompt, one) in enumerate(zip(ids, each, strict=True)):
            try:
                self.check(prompt, one)
            except UserError as error:
                raise UserError(f"prompts[{i}]: {error}") from error
        waiting = deque(zip(ids, each, strict=True))
        requests: list[Request] = []
        texts: dict[int, list[str]] = {}
        open_requests = 0
        while waiting or open_requests:
            while waiting and len(self.scheduler.waiting) + len(self._inbox) + waiting[0][1].n <= self.settings.queue:
                more = self.submit(*waiting.popleft())
                open_requests += len(more)
                requests += more
            for event in self.step():
                texts.setdefault(event.request.number, []).append(event.text)
                open_requests -= event.finish is not None
                if on_event is not None:
                    on_event(event)
        return [answer(request, "".join(texts.get(request.number, []))) for request in requests]

    def check_places(self) -> None:
        """Assert that nothing is lost or held twice. For tests."""
        self.places.check([(r.place, r.computed) for r in self.scheduler.running if r.place is not None and r.computed])


_NOBODY = Request([0], SamplingParams(), 0, Identity(), state=State.DONE)


def _scored(chunk: Chunk) -> bool:
    """Whether log probabilities of a piece's own tokens are wanted."""
    return chunk.request.params.prompt_logprobs is not None and chunk.start < len(chunk.request.prompt)
