import itertools

import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.errors import UserError
from jaxllm.ops.mask import Mask, visible

MASKS = [
    Mask(),
    Mask(window=4),
    Mask(chunk=5),
    Mask(dilation=3),
    Mask(window=2, dilation=3),
    Mask(window=3, global_tokens=2),
    Mask(window=6, chunk=4, dilation=2, global_tokens=1),
]


def allowed(mask: Mask, i: int, j: int) -> bool:
    """The definition, word for word."""
    local = mask.window is None or i - j < mask.window * mask.dilation
    local = local and (i - j) % mask.dilation == 0
    local = local and (mask.chunk is None or i // mask.chunk == j // mask.chunk)
    return j <= i and (local or j < mask.global_tokens)


@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_visible_is_the_definition_for_packed_documents_and_padding(mask):
    segments = np.array([[0, 0, 1, 1, 1, 1, 1, 1, 1, 2, 2, 2, 2, 2, 2, 0], [1] * 16])
    positions = np.array([[0, 1, 0, 1, 2, 3, 4, 5, 6, 0, 1, 2, 3, 4, 5, 0], list(range(16))])
    got = np.asarray(visible(*map(jnp.asarray, (positions, positions, segments, segments)), mask))
    for b, t, s in itertools.product(range(2), range(16), range(16)):
        same = segments[b, t] == segments[b, s] > 0
        assert got[b, t, s] == (same and allowed(mask, positions[b, t], positions[b, s])), (b, t, s)


@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_the_span_is_how_far_local_attention_reaches(mask):
    reach = max(i - j for i in range(40) for j in range(mask.global_tokens, i + 1) if allowed(mask, i, j))
    assert mask.span is None or mask.dilation * ((mask.span - 1) // mask.dilation) >= reach
    assert (mask.span is None) == (reach >= 36)


def test_a_window_counts_the_query_itself():
    p = jnp.arange(8)
    seen = Mask(window=4).sees(p[:, None], p[None])
    assert np.asarray(seen).sum(axis=1).tolist() == [1, 2, 3, 4, 4, 4, 4, 4]
    np.testing.assert_array_equal(Mask(window=1).sees(p[:, None], p[None]), np.eye(8, dtype=bool))
    np.testing.assert_array_equal(Mask(window=8).sees(p[:, None], p[None]), np.tril(np.ones((8, 8), bool)))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"window": 0}, "window: 0"),
        ({"chunk": 0}, "chunk: 0"),
        ({"dilation": 0}, "dilation: 0"),
        ({"window": 4, "global_tokens": -1}, "global_tokens: -1"),
        ({"global_tokens": 2}, "means nothing"),
    ],
)
def test_a_wrong_field_is_named(fields, words):
    with pytest.raises(UserError, match=words):
        Mask(**fields)
