"""What an engine tells of a request: news while it runs, and the answer at its end."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jaxllm.inference.requests import Request


@dataclass(frozen=True)
class Event:
    """News of a request: the ids that the host has just seen, the text that became certain, and at its end how it finished.

    start: how many new ids came before these; the request itself may have gone on by the time somebody looks.
    """

    request: Request
    tokens: tuple[int, ...]
    text: str
    finish: str | None = None
    start: int = 0


@dataclass(frozen=True)
class Answer:
    """A finished request. tokens: new ids, the one that ended it included; text: their text, without a stop text and what follows.

    finish: "stop", "length", "abort" or "error". logprobs: of each new id, and top: the most likely ids beside it, where they were
    asked for. cached: tokens of the prompt that were found in the cache. Times in seconds since the submission.
    """

    prompt_ids: list[int]
    tokens: list[int]
    text: str
    finish: str
    index: int = 0
    cached: int = 0
    logprobs: list[float] | None = None
    top: list[dict[int, float]] | None = None
    prompt_logprobs: list[float | None] | None = None
    prompt_top: list[dict[int, float] | None] | None = None
    ttft_s: float = 0.0
    seconds: float = 0.0


def table(top: Sequence[np.ndarray], count: int) -> dict[int, float]:
    """The `count` most likely ids and their log probabilities."""
    if not top or not count:
        return {}
    return {int(i): float(p) for i, p in zip(top[0][:count], top[1][:count], strict=True)}


def answer(request: Request, text: str) -> Answer:
    """What became of a request that has ended."""
    asked = request.params.logprobs is not None
    scored = request.params.prompt_logprobs is not None
    end = request.ended or request.arrival
    return Answer(
        prompt_ids=list(request.prompt),
        tokens=request.outputs,
        text=text,
        finish=request.finish or "error",
        index=request.index,
        cached=request.cached,
        logprobs=request.logprobs if asked else None,
        top=request.top if asked else None,
        prompt_logprobs=request.prompt_logprobs if scored else None,
        prompt_top=request.prompt_top if scored else None,
        ttft_s=(request.first or end) - request.arrival,
        seconds=end - request.arrival,
    )
