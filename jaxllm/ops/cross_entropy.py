"""Next-token cross-entropy straight from hidden states, without ever holding all logits.

    r = hidden @ w                      [b t v]
    l = softcap * tanh(r / softcap)     (or r), ids >= valid_vocab excluded
    nll = logsumexp(l) - l[label]
    loss_sum = sum(weights * (nll + z_loss * logsumexp(l)^2))

The vocabulary is by far the widest axis of a language model: at 8 x 256 tokens and 4096 ids the logits and their
gradient alone take 2 x 32 MiB, and at a million tokens no device holds them. So the tokens are cut into chunks along
the time axis (the batch axis stays whole, because it is the one that is spread over devices) and each chunk's logits
die before the next chunk is made. The gradient is taken in the same pass: a chunk's softmax is already there when the
forward has it, so d hidden and d w are computed at once and merely scaled by the incoming cotangent later. The head
matmul is never repeated.

The label's logit is picked by comparing and summing, not by a gather, so a vocabulary split over the `tensor` axis
needs one small reduction and no exchange of logits. z-loss: PaLM (arXiv:2204.02311), section 5; softcap: Gemma 2
(arXiv:2408.00118), section 2.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

DEFAULT_CHUNK = (
    512  # rows of a head matmul: large enough to run at full speed, small enough for its logits to stay in cache
)


class TokenStats(NamedTuple):
    """What a loss says about itself; carries no gradient.

    `nll`, `z`, `correct` are sums over tokens, each times its weight; `nll_tokens [b t]` is per token, unweighted
    (0 where the weight is 0).
    """

    nll: jax.Array
    z: jax.Array
    correct: jax.Array
    nll_tokens: jax.Array


def chunked_cross_entropy(
    hidden: jax.Array,
    w: jax.Array,
    labels: jax.Array,
    weights: jax.Array,
    *,
    valid_vocab: int,
    softcap: float | None = None,
    z_loss: float | jax.Array = 0.0,
    chunk: int = DEFAULT_CHUNK,
) -> tuple[jax.Array, TokenStats]:
    """The weighted sum of the loss above, in float32, and its statistics.

    hidden `[b t d]` (or `[n d]`), w `[d v]`, labels and weights `[b t]` (or `[n]`). `valid_vocab <= v` is the real
    vocabulary: wider ids are padding and stay out of the normaliser. About `chunk` tokens (over the whole batch) are
    in flight at once. Differentiable in `hidden` and `w` only; `weights` and `z_loss` are constants.
    """
    if hidden.ndim == 2:
        hidden, labels, weights = hidden[None], labels[None], weights[None]
    if not 0 < valid_vocab <= w.shape[1]:
        raise ValueError(f"valid_vocab={valid_vocab} must be between 1 and the width of the head, {w.shape[1]}")
    b, t, _ = hidden.shape
    count = -(-t // min(t, max(1, -(-chunk // b))))  # chunks along time
    width = -(-t // count)
    labels, weights = labels.astype(jnp.int32), weights.astype(jnp.float32)
    if pad := count * width - t:
        hidden = jnp.pad(hidden, ((0, 0), (0, pad), (0, 0)))
        labels, weights = (jnp.pad(x, ((0, 0), (0, pad))) for x in (labels, weights))
    has_z = not (isinstance(z_loss, int | float) and z_loss == 0)
    loss, nll, z, correct = _sums(
        (valid_vocab, softcap, count, has_z), hidden, w, labels, lax.stop_gradient(weights), jnp.float32(z_loss)
    )
    stop = lax.stop_gradient
    return loss, TokenStats(stop(jnp.sum(nll * weights)), stop(z), stop(correct), stop(nll[:, :t]))


Static = tuple[int, float | None, int, bool]  # valid_vocab, softcap, number of chunks, is there a z-loss


Grads = tuple[jax.Array, jax.Array] | None  # d hidden, d w
Sums = tuple[jax.Array, jax.Array, jax.Array]  # loss, z, correct


def _chunk(
    static: Static,
    w: jax.Array,
    z_loss: jax.Array,
    hidden: jax.Array,
    labels: jax.Array,
    weights: jax.Array,
    want_grad: bool,
) -> tuple[Sums, jax.Array, Grads]:
    """Loss of one chunk `[b c d]`; with `want_grad` also d hidden `[b c d]` and d w `[d v]`, both of the plain sum."""
    valid_vocab, softcap, _, has_z = static
    logits = jnp.einsum("bcd,dv->bcv", hidden, w, preferred_element_type=jnp.float32)
    capped = logits if softcap is None else softcap * jnp.tanh(logits / softcap)
    ids = lax.broadcasted_iota(jnp.int32, (1, 1, w.shape[1]), 2)
    if valid_vocab < w.shape[1]:
        capped = jnp.where(ids < valid_vocab, capped, -jnp.inf)
    top = jnp.max(capped, axis=-1)
    exp = jnp.exp(capped - top[..., None])
    total = jnp.sum(exp, axis=-1)
    norm = top + jnp.log(total)
    is_label = ids == labels[..., None]
    picked = jnp.sum(jnp.where(is_label, capped, 0.0), axis=-1)
    # A weight of 0 may sit on any label, padded ids included: keep their infinities out of the sums.
    nll = jnp.where(weights != 0, norm - picked, 0.0)
    z = jnp.sum(weights * jnp.square(norm))
    correct = jnp.sum(weights * (picked >= top))
    loss = jnp.sum(weights * nll)
    pull = jnp.ones_like(norm)  # d loss / d norm
    if has_z:
        loss, pull = loss + z_loss * z, pull + 2.0 * z_loss * norm
    if not want_grad:
        return (loss, z, correct), nll, None
    slope = exp * (pull / total * weights)[..., None]
    slope = slope - jnp.where(is_label, weights[..., None], 0.0)
    if softcap is not None:
        slope = slope * (1.0 - jnp.square(jnp.tanh(logits / softcap)))
    slope = slope.astype(hidden.dtype)
    d_hidden = jnp.einsum("bcv,dv->bcd", slope, w, preferred_element_type=jnp.float32)
    d_w = jnp.einsum("bcd,bcv->dv", hidden, slope, preferred_element_type=jnp.float32)
    return (loss, z, correct), nll, (d_hidden.astype(hidden.dtype), d_w)


def _scan(
    static: Static,
    hidden: jax.Array,
    w: jax.Array,
    labels: jax.Array,
    weights: jax.Array,
    z_loss: jax.Array,
    want_grad: bool,
) -> tuple[Sums, jax.Array, Grads]:
    """All chunks in turn: the sums, nll `[b t]` and, with `want_grad`, (d hidden, d w)."""
    b, t, d = hidden.shape
    count = static[2]
    head = w.astype(hidden.dtype)

    def cut(x: jax.Array) -> jax.Array:
        return jnp.moveaxis(x.reshape(b, count, t // count, *x.shape[2:]), 1, 0)

    def paste(x: jax.Array) -> jax.Array:
        return jnp.moveaxis(x, 0, 1).reshape(b, t, *x.shape[3:])

    def body(carry: Any, xs: tuple[jax.Array, jax.Array, jax.Array]) -> Any:
        sums, d_w = carry
        part, nll, grads = _chunk(static, head, z_loss, *xs, want_grad=want_grad)
        sums = tuple(s + p for s, p in zip(sums, part, strict=True))
        if grads is None:
            return (sums, d_w), (nll, None)
        return (sums, d_w + grads[1]), (nll, grads[0])

    zero = jnp.float32(0.0)
    start = ((zero, zero, zero), jnp.zeros(w.shape, jnp.float32) if want_grad else None)
    xs = (cut(hidden), cut(labels), cut(weights))
    if count == 1:
        (sums, d_w), ys = body(start, jax.tree.map(lambda x: x[0], xs))
        nll, d_hidden = jax.tree.map(lambda y: y[None], ys)
    else:
        (sums, d_w), (nll, d_hidden) = lax.scan(body, start, xs)
    grads = (paste(d_hidden), d_w) if want_grad else None
    return sums, paste(nll), grads


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _sums(
    static: Static, hidden: jax.Array, w: jax.Array, labels: jax.Array, weights: jax.Array, z_loss: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    (loss, z, correct), nll, _ = _scan(static, hidden, w, labels, weights, z_loss, want_grad=False)
    return loss, nll, z, correct


def _sums_fwd(
    static: Static, hidden: jax.Array, w: jax.Array, labels: jax.Array, weights: jax.Array, z_loss: jax.Array
) -> tuple[tuple[jax.Array, jax.Array, jax.Array, jax.Array], tuple[jax.Array, jax.Array]]:
    (loss, z, correct), nll, grads = _scan(static, hidden, w, labels, weights, z_loss, want_grad=True)
    assert grads is not None
    d_hidden, d_w = grads
    return (loss, nll, z, correct), (d_hidden, d_w.astype(w.dtype))


def _sums_bwd(static: Static, saved: tuple[jax.Array, jax.Array], cotangents: tuple[jax.Array, ...]) -> tuple[Any, ...]:
    d_hidden, d_w = saved
    scale = cotangents[0]  # the other outputs are statistics behind a stop_gradient
    return (d_hidden * scale.astype(d_hidden.dtype), d_w * scale.astype(d_w.dtype), None, None, None)


_sums.defvjp(_sums_fwd, _sums_bwd)


def naive_cross_entropy(
    hidden: jax.Array,
    w: jax.Array,
    labels: jax.Array,
    weights: jax.Array,
    *,
    valid_vocab: int,
    softcap: float | None = None,
    z_loss: float | jax.Array = 0.0,
) -> tuple[jax.Array, TokenStats]:
    """The same by the formula, all logits at once, gradients by autodiff: the twin that tests trust."""
    logits = jnp.einsum("...d,dv->...v", hidden, w, preferred_element_type=jnp.float32)
    if softcap is not None:
        logits = softcap * jnp.tanh(logits / softcap)
    logits = logits[..., :valid_vocab]
    norm = jax.nn.logsumexp(logits, axis=-1)
    safe = jnp.clip(labels, 0, valid_vocab - 1)[..., None]
    picked = jnp.take_along_axis(logits, safe, axis=-1)[..., 0]
    nll = jnp.where(weights != 0, norm - picked, 0.0)
    z = jnp.sum(weights * jnp.square(norm))
    loss = jnp.sum(weights * nll) + z_loss * z
    correct = jnp.sum(weights * (picked >= jnp.max(logits, axis=-1)))
    return loss, TokenStats(jnp.sum(weights * nll), z, correct, nll)
