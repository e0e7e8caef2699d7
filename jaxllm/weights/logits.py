"""The logit check: logits of a model in the two ways it can be run, and how far they are from a reference."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.cache import check_capacity
from jaxllm.layers.base import Context
from jaxllm.model import LanguageModel
from jaxllm.params import unstack


def full_logits(
    model: LanguageModel, params: Mapping[str, Any], tokens: np.ndarray, segments: np.ndarray | None = None
) -> tuple[np.ndarray, list[np.ndarray]]:
    """One call on whole sequences `[b t]`: logits fp32 `[b t v]`, and the hidden states `[b t d]` before each layer and at the end.

    The last of them is after the final norm, as transformers reports it.
    """
    ctx = Context.whole(jnp.asarray(tokens), None if segments is None else jnp.asarray(segments), capture=("stream",))
    _, out = jax.jit(lambda params, ctx: model.apply({"params": params}, ctx))(params, ctx)
    stream = np.asarray(out.capture["stream"], np.float32)
    return np.asarray(out.logits, np.float32)[..., : model.vocab_size], [
        *stream[:-1],
        np.asarray(out.hidden, np.float32),
    ]


class Stepper:
    """Rows of tokens fed through a cache in calls of any size. Calls of one width share one compiled program."""

    def __init__(self, model: LanguageModel, params: Mapping[str, Any], rows: int, capacity: int) -> None:
        self.model, self.capacity = model.unrolled(), capacity
        flat = unstack(model, params) if model.scan else dict(params)
        self.params = self.model.prepare(jax.tree.map(jnp.asarray, flat))
        self.restart(rows)

        def step(params: Any, cache: Any, tokens: Any, lengths: Any, new: Any) -> tuple[Any, Any]:
            out: Any
            cache, out = self.model.apply({"params": params}, Context.step(tokens, lengths, new), cache)
            return cache, out.logits

        self._step = jax.jit(step, donate_argnums=1)

    def restart(self, rows: int) -> None:
        """Empty the cache."""
        cache, places = self.model.init_cache(rows, self.capacity), jax.tree.leaves(self.params)[0].devices()
        # Where the weights are: a cache that is bound to no device would compile the first call for itself alone.
        self.cache = jax.device_put(cache, next(iter(places))) if len(places) == 1 else cache
        self.lengths = np.zeros(rows, np.int32)

    def __call__(self, tokens: np.ndarray, new: np.ndarray | None = None) -> np.ndarray:
        """Append the first `new[b]` (null: all) of `tokens [b t]`; logits fp32 `[b t v]`, of which as many count."""
        new = np.full(len(tokens), tokens.shape[1]) if new is None else new
        check_capacity(self.capacity, self.lengths, new)
        arrays = (np.asarray(tokens, np.int32), self.lengths.copy(), np.asarray(new, np.int32))
        self.cache, logits = self._step(self.params, self.cache, *arrays)
        self.lengths = self.lengths + arrays[2]
        return np.asarray(logits, np.float32)[..., : self.model.vocab_size]


def cached_logits(model: LanguageModel, params: Mapping[str, Any], tokens: np.ndarray, split: int) -> np.ndarray:
    """A prefill of `split` tokens, then one token a call from the cache: logits fp32 `[b t v]`."""
    step = Stepper(model, params, *tokens.shape)
    parts = [step(tokens[:, :split])]
    parts += [step(tokens[:, t : t + 1]) for t in range(split, tokens.shape[1])]
    return np.concatenate(parts, axis=1)


def greedy(model: LanguageModel, params: Mapping[str, Any], prompt: np.ndarray, count: int) -> np.ndarray:
    """The `count` most likely next tokens, one after another, of each row of `prompt [b t]`: int `[b count]`."""
    rows, length = prompt.shape
    step = Stepper(model, params, rows, length + count)
    out = [step(prompt)[:, -1].argmax(-1)]
    while len(out) < count:
        out.append(step(out[-1][:, None])[:, -1].argmax(-1))
    return np.stack(out, axis=1)


def divergence(reference: np.ndarray, logits: np.ndarray) -> float:
    """KL(reference || logits) of the next-token distributions in nats, averaged over all positions, in float64."""
    p, q = (_log_softmax(np.asarray(x, np.float64)) for x in (reference, logits))
    return float((np.exp(p) * (p - q)).sum(-1).mean())


def _log_softmax(x: np.ndarray) -> np.ndarray:
    x = x - x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))
