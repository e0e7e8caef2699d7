"""How likely a model finds a continuation of a context: what multiple choice and evaluation harnesses are made of.

log p(continuation | context) = sum_i log p(y_i | context, y_<i),     all of them in one whole-sequence call a batch
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.data.vocabulary import Tokenizer
from jaxllm.errors import UserError
from jaxllm.layers.base import Context
from jaxllm.model import LanguageModel
from jaxllm.training.losses import backbone, next_token, top_tokens

SHORTEST = 16  # rows are padded to this length or a power of two of it, so that few shapes are compiled
LONGEST = 4096  # of a model that has no limit of its own

Pair = tuple[Sequence[int], Sequence[int]]  # ids of a context, at least one, and of what follows


class Score(NamedTuple):
    """logprob: nats. greedy: every token is the model's first choice. tokens: that were scored."""

    logprob: float
    greedy: bool
    tokens: int


def pair(tokenizer: Tokenizer, context: str, continuation: str) -> tuple[list[int], list[int]]:
    """A context and its continuation as ids, as if they were one text where the border of the two is a border of tokens.

    A context starts as documents do; an empty one is what stands before a document: `bos`, or the end of another.
    """
    bare = context.rstrip(" ")  # a space belongs to the token that follows it
    continuation = context[len(bare) :] + continuation
    begin = tokenizer.prompt(bare) or [tokenizer.eos_id]
    whole = tokenizer.prompt(bare + continuation) if bare else []
    if bare and whole[: len(begin)] == begin:
        return begin, whole[len(begin) :]
    return begin, tokenizer.encode(continuation)


class Scorer:
    """Scores of one model; compiled once a length. batch: rows of a call. longest: inputs of a row; what is longer loses its beginning."""

    def __init__(self, model: LanguageModel, *, batch: int = 8, longest: int | None = None):
        self.batch = batch
        self.longest = longest or model.max_seq_len or LONGEST

        def score(params: Mapping[str, Any], rows: Mapping[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
            out = backbone(model, params, Context.whole(rows["tokens"], rows["segments"]))
            _, stats = next_token(model, params, out.hidden, rows)
            asked = rows["weights"] > 0
            best = top_tokens(model, params, out.hidden) == rows["labels"]
            return -jnp.sum(jnp.where(asked, stats.nll_tokens, 0.0), axis=1), jnp.all(best | ~asked, axis=1)

        self._score = jax.jit(score)

    def __call__(self, params: Mapping[str, Any], pairs: Sequence[Pair]) -> list[Score]:
        """One score a pair, in their order."""
        cut = [self._cut(*pair) for pair in pairs]
        order = sorted(range(len(cut)), key=lambda i: len(cut[i][0]))
        found: dict[int, Score] = {}
        for start in range(0, len(order), self.batch):
            chosen = order[start : start + self.batch]
            rows = self._rows([cut[i] for i in chosen])
            logprobs, greedy = jax.device_get(self._score(params, rows))
            for row, i in enumerate(chosen):
                found[i] = Score(float(logprobs[row]), bool(greedy[row]), cut[i][1])
        return [found[i] for i in range(len(cut))]

    def _cut(self, context: Sequence[int], continuation: Sequence[int]) -> tuple[list[int], int]:
        """The ids that fit, and how many of them are scored. The whole continuation must fit behind one token."""
        if not len(context) or not len(continuation):
            raise UserError("likelihood: a context and a continuation need at least one token each")
        if len(continuation) > self.longest:
            raise UserError(f"likelihood: a continuation of {len(continuation)} tokens is longer than {self.longest}")
        return [*context, *continuation][-(self.longest + 1) :], len(continuation)

    def _rows(self, pairs: Sequence[tuple[list[int], int]]) -> dict[str, np.ndarray]:
        length = SHORTEST
        while length < len(pairs[-1][0]) - 1:
            length *= 2
        shape = (self.batch, min(length, max(self.longest, SHORTEST)))
        rows = {name: np.zeros(shape, np.int32) for name in ("tokens", "labels", "segments")}
        weights = np.zeros(shape, np.float32)
        for row, (ids, asked) in enumerate(pairs):
            size = len(ids) - 1
            rows["tokens"][row, :size], rows["labels"][row, :size] = ids[:-1], ids[1:]
            rows["segments"][row, :size] = 1
            weights[row, size - asked : size] = 1.0
        return {**rows, "weights": weights}
