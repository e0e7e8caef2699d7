"""Text from a model: a prefill that fills the cache, then one token at a time from it.

`Generator` holds the compiled calls of one model and nothing else that changes: weights are an argument, and each
call makes its own cache, which is donated from step to step and written in place. A row is right-padded and knows its
own length, so prompts of different lengths share a batch and each gives what it would give alone.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.cache import check_capacity
from jaxllm.data.vocabulary import Tokenizer
from jaxllm.errors import UserError
from jaxllm.inference.layout import laid_out
from jaxllm.inference.programs import Programs, Progress, bucket
from jaxllm.inference.sampling import Sampling, SamplingParams
from jaxllm.inference.transcript import Generation, OnText, Stats, Transcript
from jaxllm.model import LanguageModel
from jaxllm.params import unstack

IN_FLIGHT = 2  # decode steps dispatched before the oldest is read: the device never waits for the host


class Generator:
    """Generates with one model; safe to call again and again with other weights of the same shapes.

    Args:
        model: as it was built; its stacked or unstacked parameters go through `prepare` once.
        tokenizer: gives the end-of-document id and the text; None works on ids alone and stops by length only.
        prefill_chunk: longest piece of a prompt that goes through the model at once.

    On CPU a model of a 16-bit dtype is computed in float32: XLA multiplies one row of bfloat16 by a matrix twenty times slower.
    """

    def __init__(self, model: LanguageModel, tokenizer: Tokenizer | None = None, *, prefill_chunk: int = 1024):
        if jax.default_backend() == "cpu" and model.compute_dtype.itemsize < 4:
            model = model.clone(dtype="float32")
        self.model, self.tokenizer, self.prefill_chunk = model, tokenizer, prefill_chunk
        # An id the tokenizer does not know has no text, so it must not be drawn either.
        self.vocab_size = min(model.vocab_size, tokenizer.vocab_size) if tokenizer is not None else model.vocab_size
        self.stop = () if tokenizer is None else tokenizer.stop_ids
        self.programs = Programs(model.unrolled(), self.vocab_size)

    @property
    def traces(self) -> int:
        """How often anything was traced: constant once all shapes in use are warm."""
        return self.programs.traces

    def prepare(self, params: Mapping[str, Any], rows: int = 1) -> dict[str, Any]:
        """Weights for `generate` from a parameter tree: unstacked, fused for decoding, on the device. Pure.

        rows: how many prompts will be decoded together. Any number can be; weights made for that many are the fastest (`layout.py`).
        """
        flat = unstack(self.model, params) if self.model.scan else dict(params)
        return laid_out(jax.tree.map(jnp.asarray, self.programs.model.prepare(flat)), rows)

    def check(self, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> None:
        """Raises UserError for a prompt that cannot be continued by `max_new_tokens` tokens."""
        if max_new_tokens < 1:
            raise UserError(f"max_new_tokens={max_new_tokens}: must be at least 1")
        limit = self.model.max_seq_len
        for prompt in prompts:
            if not len(prompt):
                raise UserError("prompt: has no tokens; give at least one")
            for i, token in enumerate(prompt):
                if not 0 <= token < self.vocab_size:
                    raise UserError(
                        f"prompt_ids[{i}]={token}: outside the vocabulary of {self.vocab_size} ids"
                        f" (0..{self.vocab_size - 1})"
                    )
            if limit is not None and len(prompt) + max_new_tokens > limit:
                room = limit - len(prompt)
                fix = f"use max_new_tokens={room} or less" if room > 0 else "shorten the prompt"
                raise UserError(
                    f"prompt: {len(prompt)} tokens and max_new_tokens={max_new_tokens} do not fit"
                    f" model.max_seq_len={limit}; {fix}"
                )

    def generate(
        self,
        weights: Mapping[str, Any],
        prompts: Sequence[Sequence[int]],
        *,
        max_new_tokens: int,
        sampling: SamplingParams | Sequence[SamplingParams],
        cache: bool = True,
        ignore_eos: bool = False,
        on_text: OnText | None = None,
    ) -> tuple[list[Generation], Stats]:
        """Continue each prompt (a list of ids) as one batch.

        Args:
            weights: from `prepare`.
            sampling: for all rows, or one for each.
            cache: False runs the whole sequence again for every token: slow, and the plainest truth.
            ignore_eos: go on to `max_new_tokens` in any case.
            on_text: called as on_text(row, text) as soon as text is certain.

        Returns:
            One Generation for each prompt, and what the batch took.
        """
        if not prompts:
            raise UserError("prompts: empty; give at least one")
        self.check(prompts, max_new_tokens)
        params = [sampling] * len(prompts) if isinstance(sampling, SamplingParams) else list(sampling)
        if len(params) != len(prompts):
            raise ValueError(f"{len(params)} sampling parameters for {len(prompts)} prompts")
        rows = self._batch_rows(len(prompts))
        fill = [SamplingParams(temperature=0.0)] * (rows - len(prompts))
        stop = () if ignore_eos else self.stop
        batch = Sampling.rows([p.check() for p in params] + fill)

        before = self.programs.compile_s
        self._compile(weights, self._needed(rows, max(map(len, prompts)), max_new_tokens, cache))
        compile_s = self.programs.compile_s - before
        transcript = Transcript(prompts, rows, max_new_tokens, stop, self.tokenizer, on_text)
        run = self._cached if cache else self._uncached
        processed = run(weights, transcript, batch, self._stop_ids(stop))
        stats = Stats(
            transcript.seconds,
            transcript.ttft_s,
            sum(map(len, transcript.tokens)),
            processed,
            compile_s,
            transcript.tpot_s,
        )
        return transcript.generations(), stats

    def warm_up(
        self, weights: Mapping[str, Any], *, batch: int = 1, max_prompt: int, max_new_tokens: int, cache: bool = True
    ) -> None:
        """Compile everything that prompts of 1..max_prompt tokens in batches of `batch` can need."""
        rows = self._batch_rows(batch)
        needed = (self._needed(rows, length, max_new_tokens, cache) for length in range(1, max_prompt + 1))
        self._compile(weights, set().union(*needed))

    # --- shapes ---------------------------------------------------------------------------------------------------

    def _batch_rows(self, prompts: int) -> int:
        """Padded rows: a power of two, and under a mesh a multiple of its size, so that rows divide over it."""
        rows = bucket(prompts, smallest=1)
        devices = jax.sharding.get_abstract_mesh().size
        return -(-rows // devices) * devices if devices else rows

    def _capacity(self, longest: int, max_new_tokens: int) -> int:
        return bucket(longest + max_new_tokens, self.model.max_seq_len)

    def _chunks(self, longest: int) -> list[tuple[int, int, int]]:
        """(start, valid tokens, padded tokens) of each piece of a prompt."""
        pieces = []
        for start in range(0, longest, self.prefill_chunk):
            size = min(self.prefill_chunk, longest - start)
            pieces.append((start, size, bucket(size, self.model.max_seq_len)))
        return pieces

    def _needed(self, rows: int, longest: int, max_new_tokens: int, cache: bool) -> set[tuple[Any, ...]]:
        """(method of Programs, its shapes) of every call that such a batch makes."""
        if not cache:
            lengths = range(longest, longest + max_new_tokens)
            whole = {("whole", rows, bucket(length, self.model.max_seq_len)) for length in lengths}
            return whole | {("draw", rows, len(self._stop_ids()))}
        capacity = self._capacity(longest, max_new_tokens)
        needed: set[tuple[Any, ...]] = {("init", rows, capacity), ("draw", rows, len(self._stop_ids()))}
        needed |= {("prefill", rows, capacity, padded) for _, _, padded in self._chunks(longest)}
        return needed | ({("decode", rows, capacity)} if max_new_tokens > 1 else set())

    def _compile(self, weights: Any, needed: set[tuple[Any, ...]]) -> None:
        for method, *shapes in sorted(needed):
            getattr(self.programs, method)(weights, *shapes)

    def _stop_ids(self, stop: Sequence[int] = ()) -> np.ndarray:
        """int32 of a fixed length, -1 where there is nothing to stop at."""
        return np.array([*stop, *[-1] * (max(1, len(self.stop)) - len(stop))], np.int32)

    # --- the two ways ---------------------------------------------------------------------------------------------

    def _cached(self, weights: Any, transcript: Transcript, batch: Sampling, stop: np.ndarray) -> int:
        """Prefill, then decode. Returns the tokens processed: each prompt once, and each new token but the last."""
        rows, sizes = len(transcript.remaining), transcript.prompt_sizes
        longest, steps = int(sizes.max()), int(transcript.remaining.max())
        capacity = self._capacity(longest, steps)
        draw = self.programs.draw(weights, rows, len(stop))
        decode = self.programs.decode(weights, rows, capacity) if steps > 1 else None
        cache, logits = self._prefill(weights, capacity, transcript)
        progress, processed = Progress(np.zeros(rows, np.int32), sizes, transcript.remaining.copy()), int(sizes.sum())
        progress, *drawn = draw(logits, progress, batch, stop)
        flying, dispatched = deque([drawn]), 1
        while transcript.remaining.any():
            while decode is not None and dispatched < steps and len(flying) < IN_FLIGHT:
                # Rows that stopped early have shorter caches: this bounds them all without waiting for the device.
                _check_room(capacity, longest + dispatched)
                cache, logits, progress = decode(weights, cache, progress)
                progress, *drawn = draw(logits, progress, batch, stop)
                flying.append(drawn)
                dispatched += 1
            transcript.take(*jax.device_get(flying.popleft()))
            # Each row that goes on has its newest token fed to the model by the next step.
            processed += int((transcript.remaining > 0).sum())
        return processed

    def _prefill(self, weights: Any, capacity: int, transcript: Transcript) -> tuple[Any, Any]:
        """Feed the prompts piece by piece -> cache, and the logits after each row's last token."""
        rows, sizes = len(transcript.remaining), transcript.prompt_sizes
        cache, logits = self.programs.init(weights, rows, capacity)()
        for start, size, padded in self._chunks(int(sizes.max())):
            lengths = np.minimum(sizes, start)
            new = np.clip(sizes - start, 0, size)
            _check_room(capacity, int((lengths + new).max()))
            tokens = np.zeros((rows, padded), np.int32)
            for row, prompt in enumerate(transcript.prompts):
                tokens[row, : new[row]] = prompt[start : start + size]
            prefill = self.programs.prefill(weights, rows, capacity, padded)
            cache, logits = prefill(weights, cache, logits, tokens, lengths, new)
        return cache, logits

    def _uncached(self, weights: Any, transcript: Transcript, batch: Sampling, stop: np.ndarray) -> int:
        """The whole of every unfinished sequence for each token. Returns the tokens processed: all, each time."""
        rows, processed, padded = len(transcript.remaining), 0, 0
        draw = self.programs.draw(weights, rows, len(stop))
        while transcript.remaining.any():
            active = [int(row) for row in np.flatnonzero(transcript.remaining)]
            lengths = np.zeros(rows, np.int32)
            lengths[active] = [len(transcript.sequence(row)) for row in active]
            padded = max(padded, bucket(int(lengths.max()), self.model.max_seq_len))  # never a shape not compiled yet
            tokens = np.zeros((rows, padded), np.int32)
            for row in active:
                tokens[row, : lengths[row]] = transcript.sequence(row)
            logits = self.programs.whole(weights, rows, padded)(weights, tokens, lengths)
            _, *drawn = draw(logits, Progress(lengths, lengths, transcript.remaining.copy()), batch, stop)
            transcript.take(*jax.device_get(drawn))
            processed += int(lengths.sum())
        return processed


def _check_room(capacity: int, tokens: int) -> None:
    """`check_capacity` in plain integers: it runs for every token, and nothing may compile while tokens are timed."""
    if tokens > capacity:
        check_capacity(capacity, tokens, 0)


def start_ids(tokenizer: Tokenizer, text: str) -> list[int]:
    """Ids of a text that begins a document; for an empty one without `bos`, the `eos` that ended the one before."""
    return tokenizer.prompt(text) or [int(tokenizer.eos_id)]


def sample_text(
    generator: Generator,
    params: Mapping[str, Any],
    prompts: Sequence[str],
    *,
    max_new_tokens: int = 64,
    temperature: float = 0.8,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    seed: int = 0,
) -> list[dict[str, Any]]:
    """Continue some texts with the parameters of a model in training: dicts of prompt, text, tokens and finish.

    params: as trained (stacked, whole or sharded). Row i draws with `seed + i`. A prompt that leaves no room for
    `max_new_tokens` loses its beginning. Calls with prompts of like lengths compile nothing again.
    """
    if generator.tokenizer is None:
        raise ValueError("sample_text needs a generator with a tokenizer")
    ids = [start_ids(generator.tokenizer, text) for text in prompts]
    limit = generator.model.max_seq_len
    if limit is not None:
        max_new_tokens = min(max_new_tokens, limit - 1)
        ids = [row[-(limit - max_new_tokens) :] for row in ids]
    sampling = [SamplingParams(temperature, top_k, top_p, min_p, seed + i) for i in range(len(ids))]
    weights = generator.prepare(params, rows=len(ids))
    done, _ = generator.generate(weights, ids, max_new_tokens=max_new_tokens, sampling=sampling)
    return [
        {"prompt": prompt, "text": row.text, "tokens": row.tokens, "finish": row.finish}
        for prompt, row in zip(prompts, done, strict=True)
    ]
