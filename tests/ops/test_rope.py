import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.errors import UserError
from jaxllm.layers.rope import RoPE
from jaxllm.ops.rope import inverse_frequencies, rotate, rotation


@pytest.mark.parametrize("position", [2048, 32768])
def test_angles_are_exact_to_a_hundredth_radian_at_any_model_dtype(position):
    f64 = 10000.0 ** (-np.arange(0, 128, 2) / 128) * position
    rope = RoPE()
    cos, sin = rope.angles(jnp.array([[position]], jnp.int32), 128)
    assert cos.dtype == jnp.float32
    assert np.abs(np.angle(np.exp(1j * (np.arctan2(sin[0, 0], cos[0, 0]) - f64)))).max() < 0.01
    assert inverse_frequencies(128, 1e4).dtype == np.float32


def test_layouts_on_a_unit_vector():
    x = jnp.zeros((1, 1, 1, 4)).at[..., 0].set(1.0)
    cos, sin = rotation(jnp.ones((1, 1), jnp.int32), inverse_frequencies(4, 10000.0))
    c, s = np.cos(1.0), np.sin(1.0)
    np.testing.assert_allclose(rotate(x, cos, sin)[0, 0, 0], [c, 0, s, 0], atol=1e-6)
    np.testing.assert_allclose(rotate(x, cos, sin, interleaved=True)[0, 0, 0], [c, s, 0, 0], atol=1e-6)


@pytest.mark.parametrize("interleaved", [False, True])
def test_scores_depend_on_the_distance_alone_and_partial_leaves_the_rest(interleaved):
    rope = RoPE(partial=0.5, interleaved=interleaved)
    rng = np.random.default_rng(0)
    q, k = (jnp.asarray(rng.standard_normal((1, 1, 1, 16)), jnp.float32) for _ in range(2))

    def score(a, b):
        def turn(x, p):
            return rope(x, rope.angles(jnp.array([[p]]), 16))

        return float(jnp.sum(turn(q, a) * turn(k, b)))

    assert score(7, 3) == pytest.approx(score(107, 103), abs=1e-4)
    assert score(7, 3) != pytest.approx(score(7, 4), abs=1e-4)
    np.testing.assert_array_equal(rope(q, rope.angles(jnp.array([[9]]), 16))[..., 8:], q[..., 8:])


def test_wrong_settings_are_refused():
    with pytest.raises(UserError, match="theta"):
        RoPE(theta=0.0)
    with pytest.raises(UserError, match="even"):
        RoPE(partial=0.5).dim(6)
