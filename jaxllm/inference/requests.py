"""One request, from submission to its last token, as the host knows it."""

import enum
import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxllm.inference.blocks import Identity
from jaxllm.inference.paging import Place
from jaxllm.inference.sampling import SamplingParams

_numbers = itertools.count()


class State(enum.Enum):
    WAITING = "waiting"
    RUNNING = "running"
    DONE = "done"


@dataclass(eq=False)
class Request:
    """A prompt and what becomes of it.

    tokens: the prompt and every new id that the host has seen. drawn: ids that the device has drawn and the host has not seen yet. So
    the sequence is `length = len(tokens) + drawn` long. computed: its first so many tokens are in the cache, as of the steps that have
    been dispatched: `0 <= computed < length` while it runs (a prompt that is only scored ends at its length). epoch: goes up with every
    preemption; what older steps drew is ignored.

    elder: the answer 0 of the same prompt, from whose pages this one starts. finish: "stop", "length", "abort" or "error".
    """

    prompt: Sequence[int]
    params: SamplingParams
    seed: int
    identity: Identity
    stops: frozenset[int] = frozenset()
    id: str = ""
    index: int = 0
    elder: "Request | None" = None
    arrival: float = field(default_factory=time.monotonic)
    number: int = field(default_factory=lambda: next(_numbers))
    state: State = State.WAITING
    tokens: list[int] = field(default_factory=list)
    drawn: int = 0
    computed: int = 0
    place: Place | None = None
    epoch: int = 0
    cached: int = 0  # tokens of the prompt that were found in the cache
    preemptions: int = 0
    survived: int = 0  # its length when it was last preempted for a test
    finish: str | None = None
    error: str | None = None
    logprobs: list[float] = field(default_factory=list)
    top: list[dict[int, float]] = field(default_factory=list)
    prompt_logprobs: list[float | None] = field(default_factory=list)
    prompt_top: list[dict[int, float] | None] = field(default_factory=list)
    started: float | None = None  # first admitted
    first: float | None = None  # first token seen by the host
    ended: float | None = None
    client: Any = None  # whoever asked: the engine hands it back with every event

    def __post_init__(self) -> None:
        self.prompt = list(self.prompt)
        self.tokens = self.tokens or list(self.prompt)

    @property
    def length(self) -> int:
        return len(self.tokens) + self.drawn

    @property
    def outputs(self) -> list[int]:
        return self.tokens[len(self.prompt) :]

    @property
    def written(self) -> int:
        """How many ids that is."""
        return len(self.tokens) - len(self.prompt)

    @property
    def limit(self) -> int:
        """The length at which it ends at the latest."""
        return len(self.prompt) + self.params.max_tokens

    @property
    def room(self) -> int:
        """Tokens that lie in the cache at the end: all but the last one drawn."""
        return max(self.limit - 1, len(self.prompt))

    @property
    def left(self) -> int:
        """Tokens that must go through the model before the next one can be drawn."""
        return self.length - self.computed

    @property
    def scores(self) -> bool:
        """Whether its next tokens are of the prompt, and the log probabilities of all of those are wanted."""
        return self.params.prompt_logprobs is not None and self.computed < len(self.prompt)

    @property
    def full(self) -> bool:
        """Whether all its tokens are drawn, though the host may not have seen the last of them."""
        return self.length >= self.limit
