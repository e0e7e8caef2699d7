"""What a batch has produced so far, kept on the host: ids, log probabilities, text, and the time of the first token."""

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from jaxllm.data.stream import StreamDecoder
from jaxllm.data.vocabulary import Tokenizer
from jaxllm.errors import UserError

OnText = Callable[[int, str], None]


@dataclass(frozen=True)
class Generation:
    """One finished row. `tokens` are the new ids, the one that ended it included; `text` is their text alone.

    logprobs: of each new id, under the model's unmodified distribution. finish: "stop" (end-of-document token) or
    "length" (as many tokens as were asked for).
    """

    prompt_ids: list[int]
    tokens: list[int]
    logprobs: list[float]
    text: str
    finish: Literal["stop", "length"]


@dataclass(frozen=True)
class Stats:
    """What a batch took. Times are wall seconds and hold no compilation, which `compile_s` reports apart.

    ttft_s: start to first token on the host. tokens_per_s: new tokens of all rows / seconds, prefill included.
    tokens_processed: tokens that went through the model, the padding left out. tpot_s: median time between two tokens of a row as the
    host sees them, which a stall does not move; 0 where there was one token only.
    """

    seconds: float
    ttft_s: float
    new_tokens: int
    tokens_processed: int
    compile_s: float
    tpot_s: float = 0.0

    @property
    def tokens_per_s(self) -> float:
        return self.new_tokens / self.seconds if self.seconds > 0 else 0.0


class Transcript:
    """Rows being generated. `take` adds one drawn id to every row that is not finished."""

    def __init__(
        self,
        prompts: Sequence[Sequence[int]],
        rows: int,
        max_new_tokens: int,
        stop: Collection[int],
        tokenizer: Tokenizer | None = None,
        on_text: OnText | None = None,
    ):
        self.prompts = [list(prompt) for prompt in prompts]
        self.tokens: list[list[int]] = [[] for _ in prompts]
        self.remaining = np.zeros(rows, np.int32)  # rows beyond the prompts fill the batch: finished from the start
        self.remaining[: len(prompts)] = max_new_tokens
        self.prompt_sizes = np.zeros(rows, np.int32)
        self.prompt_sizes[: len(prompts)] = [len(prompt) for prompt in prompts]
        self.ttft_s = 0.0
        self._taken: list[float] = []
        self._logprobs: list[list[float]] = [[] for _ in prompts]
        self._text: list[list[str]] = [[] for _ in prompts]
        self._streams = [StreamDecoder(tokenizer) for _ in prompts] if tokenizer is not None else None
        self._stop = frozenset(stop)
        self._on_text = on_text
        self._start = time.perf_counter()

    @property
    def seconds(self) -> float:
        """Since the start."""
        return time.perf_counter() - self._start

    @property
    def tpot_s(self) -> float:
        """Median seconds between two calls of `take`."""
        return float(np.median(np.diff(self._taken))) if len(self._taken) > 1 else 0.0

    def take(self, ids: np.ndarray, logprobs: np.ndarray) -> None:
        """ids and logprobs [rows]; entries of finished rows are ignored. Raises UserError for NaN logits."""
        self._taken.append(self.seconds)
        self.ttft_s = self._taken[0]
        for row in map(int, np.flatnonzero(self.remaining)):
            token = int(ids[row])
            if np.isnan(logprobs[row]):
                at = len(self.prompts[row]) + len(self.tokens[row])
                raise UserError(
                    f"the model's logits at position {at} are not numbers: its weights hold NaN or"
                    " infinity; use an earlier checkpoint"
                )
            self.tokens[row].append(token)
            self._logprobs[row].append(float(logprobs[row]))
            self.remaining[row] = 0 if token in self._stop else self.remaining[row] - 1
            if self._streams is not None:
                self._show(row, "" if token in self._stop else self._streams[row].push(token))
                if not self.remaining[row]:
                    self._show(row, self._streams[row].finish())

    def _show(self, row: int, text: str) -> None:
        if text:
            self._text[row].append(text)
            if self._on_text is not None:
                self._on_text(row, text)

    def sequence(self, row: int) -> list[int]:
        """Prompt and new ids of a row."""
        return self.prompts[row] + self.tokens[row]

    def generations(self) -> list[Generation]:
        """One for each prompt, in order."""
        return [
            Generation(prompt, tokens, logprobs, "".join(text), "stop" if tokens[-1] in self._stop else "length")
            for prompt, tokens, logprobs, text in zip(
                self.prompts, self.tokens, self._logprobs, self._text, strict=True
            )
        ]
