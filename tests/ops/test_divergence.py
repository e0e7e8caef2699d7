"""Divergences between two models: by the formula in float64, their gradients, top-k with a rest, chunks, padding."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import log_softmax

from jaxllm.ops.divergence import Head, chunked_divergence, divergence

RNG = np.random.default_rng(0)
STUDENT, TEACHER = (RNG.standard_normal((2, 5, 7)) * 3 for _ in range(2))


def by_hand(student, teacher, temperature, direction, top_k=None):
    """float64, one token at a time."""
    out = np.zeros(student.shape[:-1])
    for at in np.ndindex(out.shape):
        q, p = (np.exp(log_softmax(z[at] / temperature)) for z in (student, teacher))
        if top_k is not None:
            keep = np.argsort(-p, kind="stable")[:top_k]
            p, q = (np.append(x[keep], x.sum() - x[keep].sum()) for x in (p, q))
        a, b = (p, q) if direction == "forward" else (q, p)
        out[at] = temperature**2 * np.sum(a * (np.log(a) - np.log(b)))
    return out


@pytest.mark.parametrize("direction", ["forward", "reverse"])
@pytest.mark.parametrize("temperature, top_k", [(1.0, None), (2.5, None), (2.5, 3)])
def test_by_the_formula(direction, temperature, top_k):
    more = {"temperature": temperature, "direction": direction, "top_k": top_k}
    got = divergence(jnp.float32(STUDENT), jnp.float32(TEACHER), **more)
    want = by_hand(STUDENT, TEACHER, **more)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)
    assert np.all(want > 0)
    np.testing.assert_allclose(divergence(jnp.float32(TEACHER), jnp.float32(TEACHER), **more), 0.0, atol=1e-5)
    if top_k is not None:  # joining outcomes can only lose some of the difference
        assert np.all(want <= by_hand(STUDENT, TEACHER, temperature, direction) + 1e-9)


def test_the_gradient_of_the_forward_one():
    """tau (q - p), and none for the teacher."""
    student, teacher = jnp.float32(STUDENT), jnp.float32(TEACHER)
    loss = jax.grad(lambda z, y: jnp.sum(divergence(z, y, temperature=2.0)), argnums=(0, 1))
    got, none = loss(student, teacher)
    want = 2.0 * (jax.nn.softmax(student / 2.0) - jax.nn.softmax(teacher / 2.0))
    np.testing.assert_allclose(got, want, atol=1e-5)
    assert not np.any(none)


@pytest.mark.parametrize("chunk", [3, 64])
def test_chunks_from_hidden_states(chunk):
    rng = np.random.default_rng(1)
    hidden, other = (jnp.float32(rng.standard_normal((2, 5, d))) for d in (4, 6))  # another width of the teacher
    w, v = (jnp.float32(rng.standard_normal((d, 9))) for d in (4, 6))
    weights = jnp.array([[1.0, 1, 0.5, 0, 0], [1, 0, 1, 1, 0]])
    hidden = hidden.at[0, 3].set(jnp.inf)  # under weight 0 anything may stand
    teacher = Head(other, v)

    def whole(h, w):
        z, y = Head(h, w, 5.0).logits(7), teacher.logits(7)
        far = jnp.where(weights != 0, divergence(jnp.where(weights[..., None] != 0, z, 0.0), y, temperature=2.0), 0.0)
        return jnp.sum(weights * far)

    def chunked(h, w):
        return chunked_divergence(Head(h, w, 5.0), teacher, weights, valid_vocab=7, temperature=2.0, chunk=chunk)

    far, same = chunked(hidden, w)
    np.testing.assert_allclose(far, whole(hidden, w), rtol=1e-5)
    z, y = Head(jnp.nan_to_num(hidden), w, 5.0).logits(7), teacher.logits(7)
    assert same == np.sum(weights * (np.argmax(z, -1) == np.argmax(y, -1)))
    clean = hidden.at[0, 3].set(0.0)
    got, want = (jax.grad(f, argnums=(0, 1))(clean, w) for f in (lambda h, w: chunked(h, w)[0], whole))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), got, want)
    far_from = jax.grad(lambda y: chunked_divergence(Head(clean, w), y, weights, valid_vocab=7, chunk=chunk)[0])
    assert not any(np.any(g) for g in far_from(Head(other, v)))  # a teacher learns nothing, be it the student itself
