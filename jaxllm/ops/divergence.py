"""How far the next-token distributions of one model are from another's, straight from hidden states, chunk by chunk.

    p = softmax(z_T / tau),  q = softmax(z_S / tau),      forward: tau^2 sum_v p (log p - log q),   reverse: tau^2 sum_v q (log q - log p)

(Hinton et al. 2015, arXiv 1503.02531; reverse: Gu et al. 2023, arXiv 2306.08543.) The factor tau^2 keeps the size of the gradient:
d/dz_S = tau (q - p) for the forward one. With `top_k`, both are summed up to k + 1 outcomes: the k ids likeliest to the teacher, and
any other; the divergence is then a lower bound of the whole, exact in what it keeps, and no probability is renormalised away.
"""

import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from jaxllm.ops.cross_entropy import DEFAULT_CHUNK

Direction = Literal["forward", "reverse"]
DraftLoss = Literal["cross_entropy", "acceptance"]
NOT_AN_ID = -1e30  # a logit that no softmax counts and whose products with 0 are 0


class Head(NamedTuple):
    """What logits are made of. hidden `[b t d]`, w `[d v]`; softcap: see `cross_entropy`."""

    hidden: Array
    w: Array
    softcap: float | None = None

    def logits(self, valid_vocab: int) -> Array:
        """float32 `[b t valid_vocab]`."""
        z = jnp.einsum("btd,dv->btv", self.hidden, self.w, preferred_element_type=jnp.float32)
        z = z if self.softcap is None else self.softcap * jnp.tanh(z / self.softcap)
        return z[..., :valid_vocab]

    @property
    def read(self) -> Array:
        """What is cut into chunks."""
        return self.hidden

    def seen(self, part: Array, valid_vocab: int) -> tuple[Array, Array]:
        """Of a chunk: the logits, and the likeliest ids."""
        z = Head(part, self.w, self.softcap).logits(valid_vocab)
        return z, jnp.argmax(z, axis=-1)


class Kept(NamedTuple):
    """What was written down of a teacher (`jaxllm.data.soft_labels`): `ids [b t k]`, likeliest first, and logarithms of their probabilities
    and of all others together, `log_p [b t k+1]`, at some temperature."""

    ids: Array
    log_p: Array

    @property
    def read(self) -> tuple[Array, Array]:
        return self.ids, self.log_p

    def seen(self, part: tuple[Array, Array], valid_vocab: int) -> tuple[tuple[Array, Array], Array]:
        del valid_vocab
        return part, part[0][..., 0]

    def fewer(self, k: int) -> "Kept":
        """The k likeliest ids alone; those that are dropped join the others."""
        if k >= self.ids.shape[-1]:
            return self
        rest = jax.nn.logsumexp(self.log_p[..., k:], axis=-1, keepdims=True)
        return Kept(self.ids[..., :k], jnp.concatenate([self.log_p[..., :k], rest], axis=-1))


def divergence(
    student: Array,
    teacher: Array,
    *,
    temperature: float = 1.0,
    direction: Direction = "forward",
    top_k: int | None = None,
) -> Array:
    """Per token `[..]`, from float32 logits `[.. v]`. The teacher has no gradient."""
    log_q = jax.nn.log_softmax(student / temperature)
    log_p = jax.nn.log_softmax(lax.stop_gradient(teacher) / temperature)
    if top_k is not None and top_k < student.shape[-1]:
        _, ids = lax.top_k(log_p, top_k)
        log_p, log_q = _with_rest(log_p, ids), _with_rest(log_q, ids)
    return _apart(log_p, log_q, temperature, direction)


def divergence_kept(
    student: Array, teacher: tuple[Array, Array], *, temperature: float = 1.0, direction: Direction = "forward"
) -> Array:
    """The same with `top_k`, of a teacher's ids `[.. k]` and logarithms `[.. k+1]`, which were taken at the same temperature."""
    ids, log_p = teacher
    return _apart(log_p, _with_rest(jax.nn.log_softmax(student / temperature), ids), temperature, direction)


def _apart(log_p: Array, log_q: Array, temperature: float, direction: Direction) -> Array:
    a, b = (log_p, log_q) if direction == "forward" else (log_q, log_p)
    return temperature**2 * jnp.sum(jnp.exp(a) * (a - b), axis=-1)


def top_and_rest(head: Head, valid_vocab: int, k: int, temperature: float, chunk: int = DEFAULT_CHUNK) -> Kept:
    """What is written down of a teacher; about `chunk` tokens' logits live at a time."""

    def part(hidden: Array) -> tuple[Array, Array]:
        log_p = jax.nn.log_softmax(Head(hidden, head.w, head.softcap).logits(valid_vocab) / temperature)
        _, ids = lax.top_k(log_p, k)
        return ids, _with_rest(log_p, ids)

    t = head.hidden.shape[1]
    parts = lax.map(part, _cut(head.hidden, chunk))
    return Kept(*(jnp.moveaxis(x, 0, 1).reshape(x.shape[1], -1, x.shape[-1])[:, :t] for x in parts))


def _cut(x: Array, chunk: int) -> Array:
    """`[b t ..]` to pieces of about `chunk` tokens, `[n b w ..]`, zeros behind."""
    b, t = x.shape[:2]
    count = -(-t // min(t, max(1, -(-chunk // b))))
    width = -(-t // count)
    padded = jnp.pad(x, ((0, 0), (0, count * width - t), *((0, 0),) * (x.ndim - 2)))
    return jnp.moveaxis(padded.reshape(b, count, width, *x.shape[2:]), 1, 0)


def _with_rest(log_p: Array, ids: Array) -> Array:
    """Logarithms of the probabilities of `ids` `[.. k]` and of all others together `[.. k + 1]`."""
    kept = jnp.take_along_axis(log_p, ids, axis=-1)
    others = jnp.put_along_axis(log_p, ids, NOT_AN_ID, axis=-1, inplace=False)
    return jnp.concatenate([kept, jax.nn.logsumexp(others, axis=-1, keepdims=True)], axis=-1)


def draft_loss(draft: Array, trunk: Array, kind: DraftLoss = "cross_entropy") -> Array:
    """What a draft q of a trunk's distribution p loses, per token `[..]`, from float32 logits `[.. v]`. The trunk has no gradient.

    cross_entropy: `-sum_v p log q`. acceptance: `-log sum_v min(p, q)`, of the probability that a draft of q is kept (the LK objective,
    arXiv 2602.23881).
    """
    log_q, p = jax.nn.log_softmax(draft), jax.nn.softmax(lax.stop_gradient(trunk))
    if kind == "cross_entropy":
        return -jnp.sum(p * log_q, axis=-1)
    return -jnp.log(jnp.maximum(jnp.sum(jnp.minimum(p, jnp.exp(log_q)), axis=-1), jnp.finfo(jnp.float32).tiny))


def chunked_divergence(
    student: Head,
    teacher: Head | Kept,
    weights: Array,
    *,
    valid_vocab: int,
    temperature: float = 1.0,
    direction: Direction = "forward",
    top_k: int | None = None,
    chunk: int = DEFAULT_CHUNK,
) -> tuple[Array, Array]:
    """Sums over tokens, each times its weight `[b t]`: of the divergence, and of the tokens whose likeliest id is the teacher's."""
    how: dict[str, Any] = {"temperature": temperature, "direction": direction}
    if isinstance(teacher, Kept):
        teacher = teacher if top_k is None else teacher.fewer(top_k)
        far: Callable[[Array, Any], Array] = functools.partial(divergence_kept, **how)
    else:
        far = functools.partial(divergence, **how, top_k=top_k)
    return chunked_pairs(student, teacher, weights, far, valid_vocab=valid_vocab, chunk=chunk)


def chunked_pairs(
    student: Head,
    teacher: Head | Kept,
    weights: Array,
    far: Callable[[Array, Any], Array],
    *,
    valid_vocab: int,
    chunk: int = DEFAULT_CHUNK,
) -> tuple[Array, Array]:
    """Sums over tokens, each times its weight `[b t]`: of `far(z, what the teacher says)`, and of the tokens that both would choose alike.

    About `chunk` tokens' logits of both models live at a time; the backward pass makes them again.
    """

    def part(w: Array, xs: tuple[Array, Any, Array]) -> tuple[Array, Array]:
        hidden, frozen, weight = xs
        z = Head(hidden, w, student.softcap).logits(valid_vocab)
        other, best = teacher.seen(frozen, valid_vocab)
        apart = far(z, other)
        same = jnp.argmax(z, axis=-1) == best
        # A weight of 0 may sit where the models see padding: whatever they say there stays out of the sums.
        return jnp.sum(jnp.where(weight != 0, weight * apart, 0.0)), jnp.sum(weight * same)

    def body(sums: tuple[Array, Array], xs: tuple[Array, Any, Array]) -> tuple[tuple[Array, Array], None]:
        apart, same = jax.checkpoint(part)(student.w, xs)
        return (sums[0] + apart, sums[1] + same), None

    xs = jax.tree.map(lambda x: _cut(x, chunk), (student.hidden, teacher.read, weights.astype(jnp.float32)))
    zero = jnp.float32(0.0)
    (apart, same), _ = lax.scan(body, (zero, zero), xs)
    return apart, lax.stop_gradient(same)
