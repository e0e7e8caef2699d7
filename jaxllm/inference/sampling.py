"""Drawing one token id per row from logits: pure functions, every parameter an array over rows.

The order is fixed, and is the one most libraries use:

1. ids past `vocab_size` (padding of the head for sharding) are cut off: they cannot be drawn and carry no mass;
2. what a row has seen and asked for (`adjust`, only where a `History` is given):
   a. repetition penalty r on ids of prompt and output: l / r where l > 0, else l r (CTRL, arXiv 1909.05858);
   b. frequency and presence penalties on ids of the output alone: l - frequency count - presence [count > 0];
   c. logit bias, added;
   d. stop ids before `min_tokens` new ones: -inf;
3. temperature: p = softmax(logits / T). T = 0, or anything below `GREEDY_BELOW`, is exactly argmax, lowest id on ties;
4. top-k: the k most likely ids (0 = off), ties broken by the lower id, so exactly k stay;
5. top-p: of what top-k left, renormalised, the shortest prefix in descending order whose mass reaches p: an id stays
   if the mass *before* it is below p, so the most likely id always stays and p = 1 changes nothing, bit for bit;
6. min-p: ids with p_i >= min_p * max p stay (0 = off);
7. a draw by the Gumbel-max rule, with a key made from (seed of the row, absolute position of the token to be drawn).

Step 7 makes a row's draws independent of its batch mates, of how its prompt was cut into chunks, and of a restart. The
noise belongs to ids, not ranks, so switching a filter on for one row leaves every other row's draw as it was.

Log probabilities are those of the unmodified distribution, log softmax(logits) over the real vocabulary: they do
not depend on steps 2-6.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import Array
from jax.typing import ArrayLike

from jaxllm.errors import UserError

MOST_PENALTY = 100.0
MOST_BIASED = 1024
MOST_STOPS = 16
MOST_STOP_CHARS = 256
MOST_ANSWERS = 16
TOP_LOGPROBS = 20  # most likely ids that can be reported beside a drawn one
GREEDY_BELOW = 1e-6  # a gap of 2e-5 nats already decides a draw at this temperature: nothing random is left in f32


class SamplingParams(NamedTuple):
    """How one row is sampled, in plain numbers, and when it ends.

    seed: any integer; its low 64 bits count. null = a new one for each request (the engine draws it).

    The rest is for the engine (`jaxllm.inference.engine`). repetition_penalty 1, presence_penalty and frequency_penalty 0: off.
    logit_bias: (id, value) pairs. max_tokens: new tokens at most; min_tokens: before so many, none that ends the row. stop: texts,
    stop_token_ids: ids, that end it beside the model's own ends, which ignore_eos switches off. logprobs: so many most likely ids are
    reported beside each new one; prompt_logprobs: beside each of the prompt; null = none at all. n: answers to one prompt; answer i
    draws as a request of its own with seed `seed + i` would.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = 0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    max_tokens: int = 128
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    n: int = 1

    @property
    def remembers(self) -> bool:
        """Whether a draw depends on more than logits: on what was seen, or on wishes for single ids."""
        return (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
            or bool(self.logit_bias)
            or self.min_tokens > 0
        )

    def check(self) -> "SamplingParams":
        """Itself, or a UserError that names the key and the wrong value."""
        finite = np.isfinite(self.temperature)
        rules = (
            ("temperature", finite and self.temperature >= 0, "a finite number >= 0 (0 = greedy)"),
            ("top_k", self.top_k >= 0, "an integer >= 0 (0 = off)"),
            ("top_p", 0 < self.top_p <= 1, "in (0, 1] (1 = off)"),
            ("min_p", 0 <= self.min_p <= 1, "in [0, 1] (0 = off)"),
            ("repetition_penalty", 0 < self.repetition_penalty <= MOST_PENALTY, f"in (0, {MOST_PENALTY:g}] (1 = off)"),
            ("presence_penalty", abs(self.presence_penalty) <= MOST_PENALTY, f"at most {MOST_PENALTY:g} either way"),
            ("frequency_penalty", abs(self.frequency_penalty) <= MOST_PENALTY, f"at most {MOST_PENALTY:g} either way"),
            ("logit_bias", all(np.isfinite(b) for _, b in self.logit_bias), "finite numbers"),
            ("logit_bias", len(self.logit_bias) <= MOST_BIASED, f"of {MOST_BIASED} ids at most"),
            (
                "max_tokens",
                self.max_tokens >= (self.prompt_logprobs is None),
                "at least 1 (0 with prompt_logprobs alone)",
            ),
            ("min_tokens", 0 <= self.min_tokens <= self.max_tokens, f"in [0, max_tokens={self.max_tokens}]"),
            ("stop", len(self.stop) <= MOST_STOPS, f"{MOST_STOPS} texts at most"),
            (
                "stop",
                all(0 < len(text) <= MOST_STOP_CHARS for text in self.stop),
                f"texts of 1..{MOST_STOP_CHARS} characters",
            ),
            ("stop_token_ids", len(self.stop_token_ids) <= MOST_STOPS, f"{MOST_STOPS} ids at most"),
            ("logprobs", self.logprobs is None or 0 <= self.logprobs <= TOP_LOGPROBS, f"in [0, {TOP_LOGPROBS}]"),
            (
                "prompt_logprobs",
                self.prompt_logprobs is None or 0 <= self.prompt_logprobs <= TOP_LOGPROBS,
                f"in [0, {TOP_LOGPROBS}]",
            ),
            ("n", 1 <= self.n <= MOST_ANSWERS, f"in [1, {MOST_ANSWERS}]"),
        )
        for name, good, allowed in rules:
            if not good:
                raise UserError(f"{name}={getattr(self, name)}: must be {allowed}")
        return self


GREEDY = SamplingParams(temperature=0.0)


@struct.dataclass
class Sampling:
    """Sampling parameters of a batch, one entry a row: fixed shapes, so changing a value never retraces.

    Attributes: temperature, top_p, min_p float32 [b]; top_k int32 [b]; seed uint32 [b 2], high word first.
    """

    temperature: Any
    top_k: Any
    top_p: Any
    min_p: Any
    seed: Any

    @classmethod
    def rows(cls, params: Sequence[SamplingParams]) -> "Sampling":
        """Stack one SamplingParams a row into numpy arrays, which a compiled call takes as they are. A null seed counts as 0."""
        limit = np.iinfo(np.int32).max
        words = [p.seed or 0 for p in params]
        seeds = [((word >> 32) & 0xFFFFFFFF, word & 0xFFFFFFFF) for word in words]
        return cls(
            temperature=np.array([p.temperature for p in params], np.float32),
            top_k=np.array([min(p.top_k, limit) for p in params], np.int32),
            top_p=np.array([p.top_p for p in params], np.float32),
            min_p=np.array([p.min_p for p in params], np.float32),
            seed=np.array(seeds, np.uint32).reshape(len(params), 2),
        )


@struct.dataclass
class Wishes:
    """What `adjust` needs of a batch besides its history, one entry a row.

    active int32 [b]: 1 where a row needs any of it. repetition, presence, frequency float32 [b]. until int32 [b], stops int32
    [b MOST_STOPS + 4]: at positions before `until` no id of `stops` is drawn; ids past the vocabulary fill the row.
    """

    active: Any
    repetition: Any
    presence: Any
    frequency: Any
    until: Any
    stops: Any

    @classmethod
    def rows(cls, params: Sequence[SamplingParams], until: Sequence[int], stops: Sequence[Sequence[int]]) -> "Wishes":
        banned = np.full((len(params), MOST_STOPS + 4), np.iinfo(np.int32).max, np.int32)
        for row, ids in enumerate(stops):
            banned[row, : len(ids)] = ids[: banned.shape[1]]
        return cls(
            active=np.array([p.remembers for p in params], np.int32),
            repetition=np.array([p.repetition_penalty for p in params], np.float32),
            presence=np.array([p.presence_penalty for p in params], np.float32),
            frequency=np.array([p.frequency_penalty for p in params], np.float32),
            until=np.array(until, np.int32),
            stops=banned,
        )


@struct.dataclass
class History:
    """What rows have seen, by slot: counts int32 [slots v] of the output's ids, prompt bool [slots v], bias float32 [slots v]."""

    counts: Any
    prompt: Any
    bias: Any

    @classmethod
    def empty(cls, slots: int, vocab_size: int) -> "History":
        shape = (slots, vocab_size)
        return cls(jnp.zeros(shape, jnp.int32), jnp.zeros(shape, bool), jnp.zeros(shape, jnp.float32))

    def at(self, slots: Array) -> "History":
        return jax.tree.map(lambda x: jnp.take(x, slots, axis=0, mode="clip"), self)


def adjust(logits: Array, history: History, wishes: Wishes, positions: Array) -> Array:
    """Step 2 of the order above: logits [b v] -> float32 [b v], of rows whose history is given row by row."""
    logits = logits.astype(jnp.float32)
    seen = history.prompt | (history.counts > 0)
    repetition = jnp.asarray(wishes.repetition)[:, None]
    logits = jnp.where(seen, jnp.where(logits > 0, logits / repetition, logits * repetition), logits)
    logits = logits - history.counts * jnp.asarray(wishes.frequency)[:, None]
    logits = logits - (history.counts > 0) * jnp.asarray(wishes.presence)[:, None]
    logits = logits + history.bias
    early = positions < jnp.asarray(wishes.until)
    ids = jnp.where(early[:, None], jnp.asarray(wishes.stops), np.iinfo(np.int32).max)
    return logits.at[jnp.arange(logits.shape[0])[:, None], ids].set(-jnp.inf, mode="drop")


def keep(probabilities: Array, top_k: Array, top_p: Array, min_p: Array) -> Array:
    """Which ids top-k, then top-p, then min-p leave: bool [b v] from probabilities [b v] that sum to 1 a row.

    The most likely id of a row always stays. One stable sort serves all three filters.
    """
    batch, vocab = probabilities.shape
    order = jnp.argsort(-probabilities, axis=-1, stable=True)
    ordered = jnp.take_along_axis(probabilities, order, axis=-1)
    rank = jnp.arange(vocab)[None, :]
    limited = (top_k > 0)[:, None]

    kept = ~limited | (rank < top_k[:, None])
    mass = jnp.where(kept, ordered, 0.0)
    # Without top-k the total is 1 by construction; its rounded sum would move ids that sit exactly on p.
    total = jnp.where(limited, mass.sum(axis=-1, keepdims=True), 1.0)
    before = jnp.pad(jnp.cumsum(mass, axis=-1)[:, :-1], ((0, 0), (1, 0)))
    kept &= (top_p >= 1.0)[:, None] | (before < top_p[:, None] * total)
    kept &= ordered >= min_p[:, None] * ordered[:, :1]
    kept |= rank == 0
    return jnp.zeros((batch, vocab), bool).at[jnp.arange(batch)[:, None], order].set(kept)


def filter_logits(logits: Array, rows: Sampling) -> Array:
    """logits [b v] -> float32 [b v]: shifted to a maximum of 0, divided by T, -inf at ids that the filters drop.

    Rows below `GREEDY_BELOW` are treated as T = 1 here; `sample` takes their argmax from the raw logits.
    """
    logits = logits.astype(jnp.float32)
    peak = jnp.max(logits, axis=-1, keepdims=True)
    # Subtracting first keeps 1/T from overflowing the largest entry; a row of only -inf must not become NaN.
    shifted = logits - jnp.where(jnp.isfinite(peak), peak, 0.0)
    temperature, top_k, top_p, min_p = map(jnp.asarray, (rows.temperature, rows.top_k, rows.top_p, rows.min_p))
    scaled = shifted / jnp.where(temperature < GREEDY_BELOW, 1.0, temperature)[:, None]

    def drop(scaled: Array) -> Array:
        weights = jnp.exp(scaled)
        probabilities = weights / jnp.maximum(weights.sum(axis=-1, keepdims=True), jnp.finfo(jnp.float32).tiny)
        return jnp.where(keep(probabilities, top_k, top_p, min_p), scaled, -jnp.inf)

    filtering = jnp.any((top_k > 0) | (top_p < 1.0) | (min_p > 0.0))
    return jax.lax.cond(filtering, drop, lambda x: x, scaled)  # the sort costs more than the rest of the draw


def row_keys(seed: ArrayLike, positions: Array) -> Array:
    """Keys [b] from seeds uint32 [b 2] and the absolute positions int32 [b] of the tokens to be drawn."""
    # Named because only threefry gives a row the same bits alone and under vmap.
    keys = jax.random.wrap_key_data(jnp.asarray(seed), impl="threefry2x32")
    return jax.vmap(jax.random.fold_in)(keys, positions)


def chosen_logprobs(logits: Array, ids: Array) -> Array:
    """log softmax(logits)[id] as float32 [..] of logits [.. v]; -inf where a row has no finite logit."""
    logits = logits.astype(jnp.float32)
    chosen = jnp.take_along_axis(logits, ids[..., None], axis=-1)[..., 0]
    return jnp.where(jnp.all(jnp.isneginf(logits), axis=-1), -jnp.inf, chosen - _normaliser(logits))


def top_logprobs(logits: Array, vocab_size: int, count: int = TOP_LOGPROBS) -> tuple[Array, Array]:
    """The `count` most likely ids of each row of [.. v] and their log probabilities, most likely first, lower ids first on ties."""
    logits = logits[..., :vocab_size].astype(jnp.float32)
    values, ids = jax.lax.top_k(logits, min(count, vocab_size))
    return ids, values - _normaliser(logits)[..., None]


def _normaliser(logits: Array) -> Array:
    """log sum exp over the last axis, 0 where nothing is finite, as `chosen_logprobs` rounds it."""
    peak = jnp.max(logits, axis=-1)
    peak = jnp.where(jnp.isneginf(peak), 0.0, peak)
    total = jnp.sum(jnp.exp(logits - peak[..., None]), axis=-1)
    return peak + jnp.log(jnp.where(total == 0.0, 1.0, total))


def sample(
    logits: Array, rows: Sampling, positions: Array, vocab_size: int, adjusted: Array | None = None
) -> tuple[Array, Array]:
    """Draw one id a row.

    Args:
        logits: [b v], any float dtype, v >= vocab_size; -inf is allowed. A row of only -inf gives id 0, logprob -inf.
        rows: parameters of the b rows.
        positions: int32 [b], absolute position of the token to be drawn (the number of tokens before it).
        vocab_size: ids at or above it are padding.
        adjusted: [b vocab_size], what to draw from in the place of the logits: see `adjust`.

    Returns:
        ids int32 [b]; logprobs float32 [b] of these ids under the unmodified logits.
    """
    logits = logits[:, :vocab_size].astype(jnp.float32)
    source = logits if adjusted is None else adjusted
    best = jnp.argmax(source, axis=-1).astype(jnp.int32)
    greedy = jnp.asarray(rows.temperature) < GREEDY_BELOW

    def draw(logits: Array) -> Array:
        keys = row_keys(rows.seed, positions)
        noise = jax.vmap(lambda key: jax.random.gumbel(key, (vocab_size,), jnp.float32))(keys)
        drawn = jnp.argmax(filter_logits(logits, rows) + noise, axis=-1).astype(jnp.int32)
        return jnp.where(greedy, best, drawn)

    ids = jax.lax.cond(jnp.all(greedy), lambda _: best, draw, source)
    return ids, chosen_logprobs(logits, ids)
