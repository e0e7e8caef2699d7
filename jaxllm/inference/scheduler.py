"""Which tokens of which requests the next step computes: plain numbers, no device.

A step has a budget of tokens. Requests that decode come first, one token each; then prompts that have begun, oldest first, in chunks;
then waiting requests, first come first served, as long as a row, their pages and some budget are left. So nothing stalls:

- a decoding request gets one token every step, and a step computes at most `budget` tokens, which bounds the time between two tokens;
- the budget exceeds the rows, so the oldest unfinished prompt gets at least `budget - rows` tokens a step;
- the head of the queue waits for nobody who came after it; it is admitted when the running ones before it have ended, at the latest.

Two policies say when a waiting request may start. *reserve*: when its pages at its longest (prompt and `max_tokens`) and those that all
running ones may still take fit together; nothing is ever preempted. *optimistic*: when its tokens so far fit; when the pages run out,
the youngest running request is preempted: its pages are freed, it goes back to the head of the queue and computes prompt and output
again. The oldest is never preempted for a younger one, so it always advances; a request that could not fit alone is refused before it
gets here. *static*, to compare with: a batch starts when the one before has ended, all of it.
"""

from bisect import insort
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from jaxllm.inference.paging import Places
from jaxllm.inference.requests import Request, State

POLICIES = ("reserve", "optimistic", "static")


@dataclass(frozen=True)
class Chunk:
    """`count` tokens of a request from `start` on; with `last`, the next token is drawn after them."""

    request: Request
    start: int
    count: int
    last: bool


@dataclass
class Plan:
    """One step. copied: pages to copy first, for whom, from and to; restored: states likewise, and saved: those to copy last. decodes:
    requests that compute their newest token. opened: those that are new in their slots."""

    decodes: list[Request] = field(default_factory=list)
    chunks: list[Chunk] = field(default_factory=list)
    copied: list[tuple[Request, int, int]] = field(default_factory=list)
    restored: list[tuple[Request, int, int]] = field(default_factory=list)
    saved: list[tuple[Request, int, int]] = field(default_factory=list)
    opened: list[Request] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.decodes or self.chunks)

    @property
    def tokens(self) -> int:
        return len(self.decodes) + sum(chunk.count for chunk in self.chunks)


class Scheduler:
    """Waiting and running requests, and the places that they hold.

    Args:
        budget: tokens of a step. chunk: the longest piece of a prompt in one call. forks: whether answers to one prompt share its pages.
        preempt_every: for tests: preempt the youngest request every so many steps.
    """

    def __init__(
        self,
        places: Places,
        *,
        budget: int,
        chunk: int,
        policy: str = "reserve",
        forks: bool = True,
        preempt_every: int | None = None,
    ):
        self.places, self.budget, self.chunk = places, budget, chunk
        self.policy, self.forks, self._preempt_every = policy, forks, preempt_every
        self.waiting: list[Request] = []  # by number of arrival
        self.running: list[Request] = []  # by number of arrival
        self.preemptions = 0
        self._steps = 0
        self._boarding = (
            True  # of the static policy: from when the last request has ended until the rows are full or nobody waits
        )

    # --- who is here ----------------------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        insort(self.waiting, request, key=lambda r: r.number)

    def remove(self, request: Request) -> None:
        """The request has ended, or nobody wants it any more, wherever it stands; twice is no harm."""
        if request.state is State.RUNNING:
            self._leave(request)
        elif request.state is State.WAITING:
            self.waiting.remove(request)
        request.state = State.DONE

    def _leave(self, request: Request) -> None:
        assert request.place is not None
        self.running.remove(request)
        self.places.close(request.place)
        request.place = None

    def preempt(self, request: Request) -> None:
        """Free its pages; it will compute its prompt and its output again. Ids it has drawn and nobody saw are drawn again, the same."""
        self._leave(request)
        request.state, request.computed, request.drawn = State.WAITING, 0, 0
        request.epoch += 1
        request.preemptions += 1
        self.preemptions += 1
        self.add(request)

    def _preempt_one(self) -> None:
        """The youngest of those that have a new token since it happened to them last: so that all end."""
        for request in reversed(self.running):
            if len(request.tokens) > request.survived:
                request.survived = len(request.tokens)
                self.preempt(request)
                return

    # --- a step ---------------------------------------------------------------------------------------------------

    def plan(self) -> Plan:
        """The next step; its tokens count as computed from now on, for it will be dispatched."""
        plan, budget = Plan(), self.budget
        self._steps += 1
        if self._preempt_every and self._steps % self._preempt_every == 0:
            self._preempt_one()
        for request in self._each(lambda r: r.left == 1 and not r.scores):
            if not request.full and self._room(request, 1, plan):
                plan.decodes.append(request)
                request.computed += 1
                request.drawn += 1
                budget -= 1
        for request in self._each(lambda r: r.left > 1 or r.scores):
            budget -= self._chunk(request, budget, plan)
        self._admit(budget, plan)
        self._boarding &= bool(self.places.free_slots and self.waiting)
        for request in plan.decodes + [chunk.request for chunk in plan.chunks]:
            assert request.state is State.RUNNING
        return plan

    def _each(self, wanted: Callable[[Request], bool]) -> Iterator[Request]:
        """Running requests of a kind, oldest first, those left out that are preempted on the way or have done their share of the step."""
        for request in [r for r in self.running if wanted(r)]:
            if request.state is State.RUNNING:
                yield request

    def _chunk(self, request: Request, budget: int, plan: Plan) -> int:
        """Compute a piece of the request's tokens; how many."""
        count = self.places.cut(request.computed, min(request.left, self.chunk, budget), len(request.prompt))
        if count < 1 or not self._room(request, count, plan):
            return 0
        last = count == request.left and not request.full
        plan.chunks.append(Chunk(request, request.computed, count, last))
        request.computed += count
        request.drawn += last
        assert request.place is not None
        if request.computed < len(request.prompt) and (pair := self.places.snapshot(request.place, request.computed)):
            plan.saved.append((request, *pair))
        return count

    def _room(self, request: Request, count: int, plan: Plan) -> bool:
        """Make the request's next `count` tokens writable, at the cost of younger ones if need be. False: it was preempted itself."""
        assert request.place is not None
        end = request.computed + count
        while self.places.writable(request.place, request.computed, end) > self.places.free_pages:
            victim = self.running[-1]
            self._undo(victim, plan)
            self.preempt(victim)
            if victim is request:
                return False
        plan.copied += [(request, *pair) for pair in self.places.extend(request.place, request.computed, end)]
        return True

    def _undo(self, victim: Request, plan: Plan) -> None:
        """Take a preempted request out of the step that is being planned."""
        plan.decodes = [r for r in plan.decodes if r is not victim]
        plan.chunks = [c for c in plan.chunks if c.request is not victim]
        plan.opened = [r for r in plan.opened if r is not victim]
        # Targets of copies may be handed out again in this very step.
        plan.copied, plan.restored, plan.saved = (
            [c for c in copies if c[0] is not victim] for copies in (plan.copied, plan.restored, plan.saved)
        )

    # --- admission ------------------------------------------------------------------------------------------------

    def _admit(self, budget: int, plan: Plan) -> None:
        self._boarding |= not self.running
        if self.policy == "static" and not self._boarding:
            return
        for request in list(self.waiting):
            if budget < 1 or not self.places.free_slots:
                return
            if self._waits_for_elder(request, plan):
                continue
            if not self._fits(request):
                return
            self.waiting.remove(request)
            self._open(request)
            insort(self.running, request, key=lambda r: r.number)
            plan.opened.append(request)
            if request.place is not None and request.place.start is not None:
                plan.restored.append((request, request.place.start, request.place.slot))
            if request.left == 1 and not request.scores:
                if self._room(request, 1, plan):
                    plan.decodes.append(request)
                    request.computed += 1
                    request.drawn += 1
                    budget -= 1
            else:
                budget -= self._chunk(request, budget, plan)

    def _waits_for_elder(self, request: Request, plan: Plan) -> bool:
        """An answer starts from its elder's pages as soon as the elder has computed the prompt; until then it waits, and blocks nobody.

        A step copies pages before it computes, so the prompt's end must have been computed by an earlier one.
        """
        elder = request.elder
        if not self.forks or elder is None or request.preemptions or elder.state is State.DONE:
            return False
        computing = any(chunk.request is elder for chunk in plan.chunks)
        return computing or elder.state is State.WAITING or elder.computed < len(request.prompt) - 1

    def _forkable(self, request: Request) -> bool:
        elder = request.elder
        return (
            self.forks
            and elder is not None
            and elder.state is State.RUNNING
            and request.preemptions == 0
            and elder.computed >= len(request.prompt) - 1 > 0
            and not request.scores
        )

    def _open(self, request: Request) -> None:
        if self._forkable(request):
            assert request.elder is not None and request.elder.place is not None
            count = len(request.prompt) - 1  # the last token is computed by each: the first draws differ
            request.place, request.computed = self.places.fork(request.elder.place, count), count
        else:
            request.place, request.computed = self.places.open(self._known(request), request.identity)
        if not request.preemptions:
            request.cached = request.computed
        request.state = State.RUNNING

    @staticmethod
    def _known(request: Request) -> list[int]:
        """The tokens whose keys it may find. Where every token of a prompt is to be scored, none: keys have no logits."""
        return [] if request.scores else request.tokens

    def _fits(self, request: Request) -> bool:
        if self.policy != "optimistic":
            return self._missing(request, request.room) + self._owed() <= self.places.free_pages
        return self._missing(request, len(request.tokens)) <= self.places.free_pages

    def _missing(self, request: Request, length: int) -> int:
        """Free pages that a waiting request takes to become `length` long."""
        if self._forkable(request):
            return self.places.pages_for(length) - (len(request.prompt) - 1) // self.places.page_size
        return self.places.missing(self._known(request), request.identity, length)

    def _owed(self) -> int:
        """Free pages that the running requests may still take."""
        return sum(self.places.writable(r.place, r.computed, r.room) for r in self.running if r.place is not None)
