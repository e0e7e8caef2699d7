"""Keeping experts busy: losses that are added to the training loss, and rules that move a selection bias outside the gradient.

A batch of N valid tokens, k experts a token of E. `f_e` is the share of the N k choices that fell on expert e (sum 1), `P_e` the mean
over tokens of its normalised score (sum 1).

    switch      E sum_e f_e P_e                     1 at perfect balance; Switch, arXiv 2101.03961, eq. 4. Libraries that sum f to k get k
    sequence    the same within each document       DeepSeek-V3, arXiv 2412.19437, eq. 17-20
    z           mean_t (logsumexp_e z_te)^2         ST-MoE, arXiv 2202.08906, eq. 5

All are returned times N: sums over tokens, which the objective divides once by the token count of the whole step. f has no gradient.

    sign        b_e += rate * sign(mean count - count_e)                                         arXiv 2408.15664
    quantile    b_e  = the k/E quantile over tokens of (alpha_t - s_te), minus its mean over e   Kimi K3, arXiv 2607.24653
                alpha_t = the (k+1)-th largest of s_t + b:  what an expert must beat to be chosen

The statistics are additive (counts, histograms), so micro-batches and devices add up to the batch of the step.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array, lax

BINS = 1000  # of the quantile histograms; scores span 1, so a bias is known to about 1/300


def switch_loss(scores: Array, counts: Array, valid: Array) -> Array:
    """scores fp32 `[b t e]`, counts fp32 `[e]` of the chosen, valid bool `[b t]` -> N times the loss."""
    e = scores.shape[-1]
    tokens = jnp.sum(valid)
    share = lax.stop_gradient(counts / jnp.maximum(jnp.sum(counts), 1.0))
    normal = scores / (jnp.sum(scores, axis=-1, keepdims=True) + 1e-20)
    mean = jnp.sum(jnp.where(valid[..., None], normal, 0.0), axis=(0, 1)) / jnp.maximum(tokens, 1)
    return e * jnp.sum(share * mean) * tokens


def sequence_loss(scores: Array, experts: Array, segments: Array) -> Array:
    """scores fp32 `[b t e]`, experts int32 `[b t k]`, segments int32 `[b t]` (documents, 0 = padding) -> N times the loss.

    A document's loss counts as often as it has tokens. `sum_e f_de P_de` over documents d is the mean over its tokens t of
    `sum_e f_de p_te`, so what is needed is f of each token's own document: a sum between its first and its last token.
    """
    e, k = scores.shape[-1], experts.shape[-1]
    valid = segments > 0
    hits = jnp.sum((experts[..., None] == jnp.arange(e)) & valid[..., None, None], axis=2, dtype=jnp.float32)
    first, last = document_bounds(segments)
    before = jnp.pad(jnp.cumsum(hits, axis=1), ((0, 0), (1, 0), (0, 0)))

    def upto(i: Array) -> Array:
        return jnp.take_along_axis(before, i[..., None], axis=1)

    length = (last - first + 1).astype(jnp.float32)[..., None]
    share = lax.stop_gradient(upto(last + 1) - upto(first)) / (k * length)
    normal = scores / (jnp.sum(scores, axis=-1, keepdims=True) + 1e-20)
    return e * jnp.sum(jnp.where(valid[..., None], share * normal, 0.0))


def document_bounds(segments: Array) -> tuple[Array, Array]:
    """int32 `[b t]` twice: where each token's document starts and ends in its row (inclusive)."""
    index = jnp.broadcast_to(jnp.arange(segments.shape[1], dtype=jnp.int32), segments.shape)
    change = segments[:, 1:] != segments[:, :-1]
    starts = jnp.pad(change, ((0, 0), (1, 0)), constant_values=True)
    ends = jnp.pad(change, ((0, 0), (0, 1)), constant_values=True)
    first = lax.cummax(jnp.where(starts, index, 0), axis=1)
    last = lax.cummin(jnp.where(ends, index, segments.shape[1]), axis=1, reverse=True)
    return first, last


def z_loss(logits: Array, valid: Array) -> Array:
    """logits fp32 `[b t e]`, valid bool `[b t]` -> N times the loss."""
    return jnp.sum(jax.nn.logsumexp(jnp.where(valid[..., None], logits, 0.0), axis=-1) ** 2 * valid)


@dataclasses.dataclass(frozen=True)
class SignStep:
    """`update` of a bias `[e]` from the counts `[e]` of the step's tokens: a step of fixed size towards equal load."""

    rate: float

    def __call__(self, bias: Array, counts: Array) -> Array:
        return bias + self.rate * jnp.sign(jnp.mean(counts, axis=-1, keepdims=True) - counts)


def histogram_range(bias: Array) -> tuple[Array, Array]:
    """Where `alpha - s` can lie, for scores in [0, 1] and this bias: `[min b - 1, max b + 1]`."""
    return jnp.min(bias) - 1.0, jnp.max(bias) + 1.0


def quantile_histogram(scores: Array, bias: Array, valid: Array, top_k: int) -> Array:
    """How often `alpha_t - s_te` fell into each of `BINS` bins, `[e, BINS]`. scores fp32 `[b t e]` in [0, 1], bias fp32 `[e]`."""
    e = scores.shape[-1]
    biased = scores + bias
    alpha = lax.top_k(biased, min(top_k + 1, e))[0][..., -1:]
    low, high = histogram_range(bias)
    place = ((alpha - scores) - low) / (high - low) * BINS
    place = jnp.clip(place.astype(jnp.int32), 0, BINS - 1) + BINS * jnp.arange(e, dtype=jnp.int32)
    weight = jnp.broadcast_to(valid[..., None], place.shape).astype(jnp.float32)
    return jnp.zeros(e * BINS, jnp.float32).at[place].add(weight).reshape(e, BINS)


@dataclasses.dataclass(frozen=True)
class QuantileStep:
    """`update` of a bias `[e]` from the histograms `[e, BINS]`: with it, share `share` of the tokens would choose each expert."""

    share: float

    def __call__(self, bias: Array, histogram: Array) -> Array:
        low, high = histogram_range(bias)
        cumulative = jnp.cumsum(histogram, axis=-1)
        total = cumulative[:, -1:]
        wanted = self.share * total
        bin_ = jnp.minimum(jnp.sum(cumulative < wanted, axis=-1, keepdims=True), BINS - 1)
        inside = jnp.take_along_axis(histogram, bin_, axis=-1)
        part = (wanted - (jnp.take_along_axis(cumulative, bin_, axis=-1) - inside)) / jnp.maximum(inside, 1.0)
        new = low + (bin_ + part)[:, 0] * (high - low) / BINS
        return jnp.where(total[0, 0] > 0, new - jnp.mean(new), bias)
