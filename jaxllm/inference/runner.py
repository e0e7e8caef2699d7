"""The device side of the engine: pools, the few compiled calls on them, and nothing about who asked for what.

Every call has fixed shapes from two lists, rows (of decoding) and tokens (of a prompt's chunk), times the widths of page tables, so
after `warm_up` nothing is traced again; `traces` counts, and a call that is compiled after all says which argument is new. Pools and
what the draws remember go in donated and come out: nobody keeps the old ones. The newest id of each slot stays on the device, so the next
step starts without the host having seen it.

    forward   (weights, cache, drawer.ids, batch)      -> cache, logits [r v] of each row's last token
    score     the same, and log probabilities of the chunk's own tokens
    draw      (logits, drawer, slots, positions, ...)  -> drawer, ids [r], logprobs [r]
"""

import dataclasses
import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import Array

from jaxllm.cache import cache_bytes
from jaxllm.inference.sampling import (
    History,
    Sampling,
    SamplingParams,
    Wishes,
    adjust,
    chosen_logprobs,
    sample,
    top_logprobs,
)
from jaxllm.inference.sizes import Sizes, bucket
from jaxllm.layers.base import Context
from jaxllm.measure.watch import Programs
from jaxllm.model import LanguageModel
from jaxllm.pages import PAGES, Paged, Pages

COPIES = 8  # pages that one call copies


@struct.dataclass
class Batch:
    """What a forward call is told of its rows, int32: tokens [r t]; lengths, new, slots [r]; table [r n]. held [r]: 1 = the row's one
    token is the one that was drawn last in its slot, whatever `tokens` says."""

    tokens: Any
    lengths: Any
    new: Any
    slots: Any
    table: Any
    held: Any


@struct.dataclass
class Drawer:
    """What draws remember, by slot: the newest id int32 [slots], and what penalties and wishes need."""

    ids: Any
    history: History


class Runner:
    """Compiled calls of one model on one set of pools.

    Args:
        model: unrolled. weights: prepared. vocab_size: ids at or above it are never drawn. dtype: of the cache; None = the model's.
        kernel: what attends on pages.
        log: told of what is compiled after the warm-up, while requests wait for it.
    """

    def __init__(
        self,
        model: LanguageModel,
        weights: Mapping[str, Any],
        sizes: Sizes,
        vocab_size: int,
        dtype: Any = None,
        kernel: str = "auto",
        log: Callable[[str], None] | None = None,
    ):
        self.model, self.weights, self.sizes, self.vocab_size = model, weights, sizes, vocab_size
        self.dtype, self.kernel = dtype, kernel
        self.traces = 0
        self._log, self._warm = log, False
        self.report: list[dict[str, Any]] = []  # of the warm-up: call, shape, seconds
        self._forward = jax.jit(self._counted("forward", self._forward_call), donate_argnums=1)
        self._score = jax.jit(self._counted("score", self._score_call), donate_argnums=1)
        self._draw = jax.jit(self._counted("draw", self._draw_call), donate_argnums=1)
        self._top = jax.jit(self._counted("top", self._top_call))
        self._copy = jax.jit(self._counted("copy", self._copy_call), donate_argnums=0)
        self._copy_states = jax.jit(self._counted("copy states", self._copy_states_call), donate_argnums=0)
        self._remember = jax.jit(self._counted("remember", self._remember_call), donate_argnums=0)
        self.reset()

    def reset(self) -> None:
        """Pools made anew: at the start, and after a step that failed, which has lost the old ones."""
        s = self.sizes
        pages = None if s.contiguous else Pages(s.pages, s.page_size, self.kernel)
        slots = s.slots if s.contiguous else s.slots + 1
        self.cache: Any = None  # free the old ones first
        self.drawer: Any = None
        states = slots + s.snapshots
        self.cache = jax.jit(lambda: self.model.init_cache(states, s.length, self.dtype, pages=pages))()
        history = jax.jit(lambda: History.empty(slots, self.vocab_size))()
        self.drawer = Drawer(jnp.zeros(slots, jnp.int32), history)

    @property
    def cache_bytes(self) -> int:
        return cache_bytes(self.cache)

    @property
    def shares(self) -> bool:
        """Whether all that the model remembers of a row lies in pages: else a prefix is reused by copies of states, and no row forked."""
        layers = jax.tree.leaves(self.cache, is_leaf=lambda x: isinstance(x, Paged))
        return all(isinstance(layer, Paged) and layer.shares for layer in layers)

    # --- the calls, as they are traced ----------------------------------------------------------------------------

    def _counted(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        programs = Programs(f"engine, {name}")

        @functools.wraps(function)
        def counted(*args: Any) -> Any:
            self.traces += 1
            line = programs.see(args, {})
            if line is not None and self._warm and self._log is not None:
                self._log(line)
            return function(*args)

        return counted

    def _apply(self, weights: Any, method: str, *args: Any) -> Any:
        return self.model.apply({"params": weights}, *args, method=method)

    def _backbone(self, weights: Any, cache: Any, ids: Array, batch: Batch) -> tuple[Any, Array]:
        """The cache with the batch in it, and its hidden states [r t d]."""
        slots = jnp.asarray(batch.slots)
        drawn = jnp.take(ids, slots, mode="clip")[:, None]
        tokens = jnp.where(jnp.asarray(batch.held)[:, None] > 0, drawn, jnp.asarray(batch.tokens))
        tables = None if self.sizes.contiguous else {PAGES: batch.table}
        ctx = Context.step(tokens, batch.lengths, batch.new, slots=slots, tables=tables)
        one = self.sizes.contiguous and tokens.shape[0] == 1 < self.sizes.slots
        mine = jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, slots[0], 1), cache) if one else cache
        mine, out = self._apply(weights, "backbone", ctx, mine)
        if one:  # contiguous caches: a prompt's chunk takes its row out and puts it back
            put = jax.lax.dynamic_update_slice_in_dim
            mine = jax.tree.map(lambda x, row: put(x, row.astype(x.dtype), slots[0], 0), cache, mine)
        return mine, out.hidden

    def _forward_call(self, weights: Any, cache: Any, ids: Array, batch: Batch) -> tuple[Any, Array]:
        cache, hidden = self._backbone(weights, cache, ids, batch)
        if hidden.shape[1] > 1:
            last = jnp.maximum(jnp.asarray(batch.new) - 1, 0)
            hidden = jnp.take_along_axis(hidden, last[:, None, None], axis=1)
        # The barrier keeps XLA on CPU from pulling the norm before it into the product with the head: see `Programs._head`.
        return cache, self._apply(weights, "head", jax.lax.optimization_barrier(hidden))[:, 0]

    def _score_call(
        self, weights: Any, cache: Any, ids: Array, batch: Batch, after: Array
    ) -> tuple[Any, Array, tuple[Array, Array, Array]]:
        """One row's chunk; of each place, the log probability of the token `after [1 t]` that follows it, and the most likely ids."""
        cache, hidden = self._backbone(weights, cache, ids, batch)
        logits = self._apply(weights, "head", jax.lax.optimization_barrier(hidden))[0]
        top, values = top_logprobs(logits, self.vocab_size)
        scored = chosen_logprobs(logits[:, : self.vocab_size], after[0])
        last = jnp.maximum(jnp.asarray(batch.new) - 1, 0)
        return cache, jnp.take(logits, last, axis=0), (scored, top, values)

    def _draw_call(
        self, logits: Array, drawer: Drawer, slots: Array, positions: Array, live: Array, rows: Sampling, wishes: Wishes
    ) -> tuple[Drawer, Array, Array]:
        """Draw the token at `positions [r]` of each row and remember it under its slot, where `live [r]`."""
        slots, positions = jnp.asarray(slots), jnp.asarray(positions)
        known = logits[:, : self.vocab_size].astype(jnp.float32)
        active = jnp.any(jnp.asarray(wishes.active) > 0)
        adjusted = jax.lax.cond(
            active, lambda x: adjust(x, drawer.history.at(slots), wishes, positions), lambda x: x, known
        )
        ids, logprobs = sample(logits, rows, positions, self.vocab_size, adjusted)
        place = jnp.where(jnp.asarray(live) > 0, slots, drawer.ids.shape[0])  # a row of padding is dropped
        counts = drawer.history.counts.at[place, ids].add(1, mode="drop")
        history = dataclasses.replace(drawer.history, counts=counts)
        drawn = Drawer(drawer.ids.at[place].set(ids, mode="drop"), history)
        return drawn, ids, logprobs

    def _top_call(self, logits: Array) -> tuple[Array, Array]:
        return top_logprobs(logits, self.vocab_size)

    def _copy_call(self, cache: Any, source: Array, target: Array) -> Any:
        """Pages `source [COPIES]` over `target`; 0 over 0 is nothing."""
        return jax.tree.map(
            lambda layer: layer.copy(source, target), cache, is_leaf=lambda layer: isinstance(layer, Paged)
        )

    def _copy_states_call(self, cache: Any, source: Array, target: Array) -> Any:
        """States of the slots `source [COPIES]` over `target`; 0 over 0 is nothing."""
        return jax.tree.map(
            lambda layer: layer.copy(source, target, pages=False), cache, is_leaf=lambda layer: isinstance(layer, Paged)
        )

    def _remember_call(self, drawer: Drawer, slot: Array, counts: Array, prompt: Array, bias: Array) -> Drawer:
        old = drawer.history
        history = History(old.counts.at[slot].set(counts), old.prompt.at[slot].set(prompt), old.bias.at[slot].set(bias))
        return Drawer(drawer.ids, history)

    # --- what the engine calls ------------------------------------------------------------------------------------

    def forward(self, batch: Batch) -> Array:
        """Logits [r v] after each row's last token, on the device."""
        self.cache, logits = self._forward(self.weights, self.cache, self.drawer.ids, batch)
        return logits

    def score(self, batch: Batch, after: np.ndarray) -> tuple[Array, tuple[Array, Array, Array]]:
        self.cache, logits, scores = self._score(self.weights, self.cache, self.drawer.ids, batch, after)
        return logits, scores

    def draw(
        self, logits: Array, slots: np.ndarray, positions: np.ndarray, live: np.ndarray, rows: Sampling, wishes: Wishes
    ) -> tuple[Array, Array]:
        self.drawer, ids, logprobs = self._draw(logits, self.drawer, slots, positions, live, rows, wishes)
        return ids, logprobs

    def top(self, logits: Array) -> tuple[Array, Array]:
        return self._top(logits)

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy pages, in groups: no page of one group is both a source and a target of it (targets are fresh)."""
        for source, target in _groups(pairs):
            self.cache = self._copy(self.cache, source, target)

    def copy_states(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy what rows remember besides their pages, slot to slot, in groups likewise."""
        for source, target in _groups(pairs):
            self.cache = self._copy_states(self.cache, source, target)

    def remember(
        self, slot: int, prompt: Sequence[int], outputs: Sequence[int], bias: Sequence[tuple[int, float]]
    ) -> None:
        """What the draws of a slot's new row start from."""
        counts = np.bincount(np.asarray(outputs, np.int64), minlength=self.vocab_size).astype(np.int32)
        seen, wished = np.zeros(self.vocab_size, bool), np.zeros(self.vocab_size, np.float32)
        seen[np.asarray(prompt, np.int64)] = True
        for token, value in bias:
            wished[token] += value
        self.drawer = self._remember(self.drawer, np.int32(slot), counts[: self.vocab_size], seen, wished)

    # --- shapes ---------------------------------------------------------------------------------------------------

    def width(self, pages: int) -> int:
        return bucket(self.sizes.widths, pages)

    def batch(self, rows: int, tokens: int, width: int) -> Batch:
        """An empty batch: all rows are padding, at slot 0 and page 0."""
        one = [np.zeros(rows, np.int32) for _ in range(4)]
        table = np.zeros((rows, 0 if self.sizes.contiguous else width), np.int32)
        return Batch(np.zeros((rows, tokens), np.int32), one[0], one[1], one[2], table, one[3])

    def warm_up(self, scores: bool = True) -> None:
        """Compile every shape, by running each on padding alone. `report` says what it took."""
        s = self.sizes
        for width in s.widths:
            for rows in s.rows:
                self._timed("decode", (rows, width), self.forward, self.batch(rows, 1, width))
            for tokens in s.tokens:
                for rows in sorted({1, s.together(tokens)}):
                    self._timed("prefill", (rows, tokens, width), self.forward, self.batch(rows, tokens, width))
                if scores:
                    after = np.zeros((1, tokens), np.int32)
                    self._timed("score", (1, tokens, width), self.score, self.batch(1, tokens, width), after)
        for rows in sorted({1, *s.rows}):
            logits = jnp.zeros((rows, self.model.padded_vocab), self.model.logits_dtype)
            zeros = np.zeros(rows, np.int32)
            params = [SamplingParams()] * rows
            wishes = Wishes.rows(params, [0] * rows, [()] * rows)
            self._timed("draw", (rows,), self.draw, logits, zeros, zeros, zeros, Sampling.rows(params), wishes)
            self._timed("top", (rows,), self.top, logits)
        if not s.contiguous:
            self._timed("copy", (COPIES,), self.copy, [(0, 0)])
        if s.snapshots:
            self._timed("states", (COPIES,), self.copy_states, [(0, 0)])
        self._timed("remember", (1,), self.remember, 0, [], [], ())
        self._warm = True

    def _timed(self, call: str, shape: tuple[int, ...], run: Callable[..., Any], *args: Any) -> None:
        start = time.perf_counter()
        jax.block_until_ready((run(*args), self.cache, self.drawer))
        self.report.append({"call": call, "shape": shape, "seconds": round(time.perf_counter() - start, 3)})


def _groups(pairs: Sequence[tuple[int, int]]) -> Iterator[np.ndarray]:
    """Pairs as `[2, COPIES]`, filled up with copies of nothing."""
    for start in range(0, len(pairs), COPIES):
        some = np.zeros((2, COPIES), np.int32)
        group = pairs[start : start + COPIES]
        some[:, : len(group)] = np.array(group, np.int32).T
        yield some
