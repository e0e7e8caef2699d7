import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.cache import EMPTY, KVCache, RingCache, cache_bytes, check_capacity, keep_pending, replay, write
from jaxllm.errors import UserError


def test_write_places_rows_and_drops_padding_and_overflow():
    buffer = jnp.zeros((2, 1, 4, 1))
    update = jnp.arange(1.0, 7.0).reshape(2, 1, 3, 1)
    positions = jnp.array([[0, 1, 2], [2, 3, 4]])
    valid = jnp.array([[True, True, False], [True, True, True]])
    got = np.asarray(write(buffer, update, positions, valid))[:, 0, :, 0]
    np.testing.assert_array_equal(got, [[1, 2, 0, 0], [0, 0, 4, 5]])


def test_a_negative_position_does_not_wrap_to_the_last_slot():
    got = write(jnp.zeros((1, 1, 4, 1)), jnp.ones((1, 1, 1, 1)), jnp.array([[-1]]), jnp.array([[True]]))
    assert float(jnp.sum(got)) == 0


def test_capacity_8_cursor_6_write_4_is_refused_on_the_host():
    check_capacity(8, 6, 2)
    with pytest.raises(UserError, match="10 tokens do not fit a cache of 8"):
        check_capacity(8, np.array([1, 6]), np.array([4, 4]))


def test_replay_puts_accepted_before_new_and_keeps_the_tentative():
    pending = jnp.array([[10, 11, 12], [20, 21, 22]])[..., None]
    fresh = jnp.array([[1, 2, 3, 4], [5, 6, 7, 8]])[..., None]
    run = replay(pending, fresh, jnp.array([2, 0]), jnp.array([4, 2]), jnp.array([3, 1]))
    inputs = np.asarray(run.inputs)[..., 0]
    np.testing.assert_array_equal(inputs[0, :6], [10, 11, 1, 2, 3, 4])
    np.testing.assert_array_equal(inputs[1, :2], [5, 6])
    np.testing.assert_array_equal(np.asarray(run.valid), [[True] * 6 + [False], [True] * 2 + [False] * 5])
    np.testing.assert_array_equal(run.commit, [3, 1])
    np.testing.assert_array_equal(np.asarray(run.output)[:, :2], [[2, 3], [0, 1]])
    np.testing.assert_array_equal(np.asarray(keep_pending(run, 3))[0, :, 0], [2, 3, 4])
    assert int(keep_pending(run, 3)[1, 0, 0]) == 6


def test_bytes():
    assert cache_bytes(KVCache.zeros(2, 3, 4, 5, 6, jnp.bfloat16)) == 2 * 3 * 4 * 11 * 2


def test_a_ring_keeps_the_newest_tokens_and_its_prefix():
    """2 kept and 3 in turn: of 9 tokens in one call 0, 1 and 6, 7, 8 stay; padding is not written; the next takes the oldest's place."""
    ring = RingCache.zeros(1, 1, 5, 1, 1, jnp.float32)
    assert (np.asarray(ring.positions) == EMPTY).all()
    at = jnp.arange(10)[None]
    values = at[:, None, :, None].astype(jnp.float32)
    ring = ring.write(values, -values, at, at < 9, jnp.array([9]), keep=2)
    np.testing.assert_array_equal(ring.positions, [[0, 1, 8, 6, 7]])
    np.testing.assert_array_equal(ring.k[0, :, 0], [0, 1, 8, 6, 7])
    one = jnp.array([[9]])
    ring = ring.write(9.0 * jnp.ones((1, 1, 1, 1)), jnp.zeros((1, 1, 1, 1)), one, one > 0, jnp.array([10]), keep=2)
    np.testing.assert_array_equal(ring.positions, [[0, 1, 8, 9, 7]])
    np.testing.assert_array_equal(ring.v[0, :, 0], [0, -1, -8, 0, -7])
