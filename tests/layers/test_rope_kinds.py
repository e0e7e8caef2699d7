"""Every kind of rotary embedding: equal to transformers' numbers, neutral where it should be, and safe from casts."""

import dataclasses
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.compose import component
from jaxllm.config import options
from jaxllm.errors import UserError
from jaxllm.layers import rope as kinds
from jaxllm.layers.base import Context
from jaxllm.layers.gqa import GQA
from jaxllm.layers.rope import DynamicNTKRoPE, Llama3RoPE, LongRoPE, NTKRoPE, ProportionalRoPE, RoPE, YaRN
from jaxllm.ops.rope import rotate

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "rope.json").read_text())
HEAD = GOLDEN["head_dim"]
YAML_NEEDS = {  # what the yaml files leave to the user
    "dynamic_ntk": {"max_position": 64},
    "yarn": {"original_max_position": 64},
    "longrope": {"original_max_position": 64, "short_factor": [1.0] * 16, "long_factor": [2.0] * 16},
}


def made(kind, fields):
    fields = {k: tuple(v) if isinstance(v, list) else v for k, v in fields.items()}
    return getattr(kinds, kind)(**fields)


def from_yaml(name, **fields):
    return component("rope", name, **YAML_NEEDS.get(name, {}), **fields)


@pytest.mark.parametrize("name", sorted(GOLDEN["kinds"]))
def test_frequencies_and_factors_equal_transformers(name):
    case = GOLDEN["kinds"][name]
    rope = made(case["kind"], case["fields"])
    f = rope.frequencies(HEAD, case["length"])
    assert f.dtype == np.float32 and f.shape == (rope.dim(HEAD) // 2,)
    np.testing.assert_allclose(f, np.asarray(case["frequencies"]), rtol=2e-6)  # theirs are powers in float32
    assert rope.magnitude == pytest.approx(case["magnitude"], rel=1e-6)
    assert rope.attention_scale(HEAD) == pytest.approx(case["attention_scale"], rel=1e-6)
    cos, sin = rope.angles(jnp.full((1, case["length"]), 3), HEAD)
    np.testing.assert_allclose(cos[0, -1], np.cos(3 * f) * rope.magnitude, atol=1e-6)
    np.testing.assert_allclose(sin[0, -1], np.sin(3 * f) * rope.magnitude, atol=1e-6)


@pytest.mark.parametrize(
    ("fields", "magnitude", "scale"),
    [
        ({"factor": 40.0, "mscale": 0.707, "mscale_all_dim": 0.707}, 1.0, 1.58963),
        ({"factor": 40.0, "mscale": 1.0, "mscale_all_dim": 1.0}, 1.0, 1.87385),
        ({"factor": 4.0}, 1.13863, 1.0),
        ({"factor": 4.0, "attention_factor": 1.0}, 1.0, 1.0),
        ({"factor": 1.0, "mscale": 1.0, "mscale_all_dim": 0.5}, 1.0, 1.0),
        ({"factor": 4.0, "mscale": 0.0, "mscale_all_dim": 1.0}, 1.13863, 1.13863**2),
    ],
)
def test_yarn_has_two_separate_factors(fields, magnitude, scale):
    rope = YaRN(original_max_position=4096, **fields)
    assert rope.magnitude == pytest.approx(magnitude, abs=1e-5)
    assert rope.attention_scale(64) == pytest.approx(scale, abs=1e-4)


@pytest.mark.parametrize("name", ["linear", "ntk", "yarn", "llama3", "longrope"])
def test_a_factor_of_one_is_the_default(name):
    fields = {"factor": 1.0, "theta": 1e4} | ({"long_factor": [1.0] * 16} if name == "longrope" else {})
    rope = component("rope", name, **YAML_NEEDS.get(name, {}) | fields)
    np.testing.assert_allclose(rope.frequencies(HEAD, 100), RoPE().frequencies(HEAD, 100), rtol=1e-6)
    assert rope.magnitude == rope.attention_scale(HEAD) == 1.0


def test_neutral_ends_of_llama3_and_proportional():
    plain = RoPE().frequencies(HEAD, 8)
    long_original = Llama3RoPE(factor=8.0, original_max_position=10**9)
    np.testing.assert_allclose(long_original.frequencies(HEAD, 8), plain, rtol=1e-6)
    np.testing.assert_array_equal(ProportionalRoPE(partial=1.0).frequencies(HEAD, 8), plain)
    x = jax.random.normal(jax.random.key(0), (1, 1, 1, HEAD))
    rope = ProportionalRoPE(partial=0.25)
    turned = rope(x, rope.angles(jnp.array([[5]]), HEAD))
    still = [i for i in range(HEAD) if i % 16 >= 4]  # pairs (i, i + 16); the first int(0.25 * 32 // 2) = 4 turn
    np.testing.assert_array_equal(turned[..., still], x[..., still])
    assert np.abs(turned - x)[..., [0, 1, 2, 3, 16, 17, 18, 19]].min() > 1e-4


def test_ntk_stretches_the_slowest_channel_by_the_factor_and_leaves_the_fastest():
    ratio = NTKRoPE(factor=4.0).frequencies(HEAD, 8) / RoPE().frequencies(HEAD, 8)
    assert ratio[0] == 1 and ratio[-1] == pytest.approx(1 / 4, rel=1e-5) and (np.diff(ratio) < 0).all()


def test_both_interleaved_layouts_of_deepseek_have_our_scores():
    g = GOLDEN["interleaved"]
    rope = RoPE(theta=g["theta"], interleaved=True)
    angles = rope.angles(jnp.array([g["positions"]]), 8)
    q, k = (rope(jnp.array(g[name])[None, :, None], angles)[0, :, 0] for name in "qk")
    np.testing.assert_allclose(q, g["rotated_q_v2"], atol=1e-6)
    np.testing.assert_allclose(q @ k.T, g["scores_v2"], atol=1e-5)
    np.testing.assert_allclose(q @ k.T, g["scores_v3"], atol=1e-5)
    order = [0, 2, 4, 6, 1, 3, 5, 7]  # pairs (2i, 2i + 1) laid out as (i, i + 4)
    half = [rotate(jnp.array(g[name])[None, :, None][..., order], *angles)[0, :, 0] for name in "qk"]
    np.testing.assert_allclose(half[0] @ half[1].T, g["scores_v3"], atol=1e-5)


@pytest.mark.parametrize("name", options("rope"))
def test_nothing_rounds_the_frequencies_when_all_is_cast_to_bfloat16(name):
    """Phases at far positions are those of float64, in a bf16 model whose every array is bf16 too."""
    rope = from_yaml(name)
    layer = GQA(d_model=HEAD, num_heads=1, rope=rope, dtype=jnp.bfloat16, param_dtype=jnp.bfloat16)
    ctx = Context.whole(jnp.zeros((1, 2), jnp.int32))
    x = jnp.zeros((1, 2, HEAD), jnp.bfloat16)
    params = jax.eval_shape(lambda: layer.init(jax.random.key(0), x, ctx))["params"]
    assert set(params) == {"q_proj", "k_proj", "v_proj", "o_proj"}  # no frequency to cast, to restore or to train
    exact = dataclasses.replace(rope).frequencies(HEAD, 1).astype(np.float64)
    for position in (2048, 32768):
        cos, sin = rope.angles(jnp.array([[position]], jnp.int32), HEAD)
        assert cos.dtype == sin.dtype == jnp.float32
        phase = np.angle(np.exp(1j * (np.arctan2(sin[0, 0], cos[0, 0]) - exact * position)))
        assert np.abs(phase).max() < 0.01
    np.testing.assert_allclose(np.diff(np.log(RoPE().frequencies(128, 1))), -np.log(1e4) / 64, rtol=1e-4)


def test_the_length_of_the_call_decides_where_it_must_and_caches_are_refused_there():
    follows = DynamicNTKRoPE(factor=2.0, max_position=64)
    np.testing.assert_array_equal(follows.frequencies(HEAD, 64), RoPE().frequencies(HEAD, 64))
    assert follows.frequencies(HEAD, 128)[-1] == pytest.approx(RoPE().frequencies(HEAD, 1)[-1] / 3, rel=1e-5)
    fixed = dataclasses.replace(follows, length=128)
    for length in (1, 64, 500):
        np.testing.assert_array_equal(fixed.frequencies(HEAD, length), follows.frequencies(HEAD, 128))
    lists = {"short_factor": (1.0,) * 16, "long_factor": (2.0,) * 16}
    by_call = LongRoPE(original_max_position=64, **lists)
    assert by_call.frequencies(HEAD, 64)[0] == 1.0 and by_call.frequencies(HEAD, 65)[0] == 0.5
    always = dataclasses.replace(by_call, use_long=True)
    assert always.frequencies(HEAD, 1)[0] == 0.5

    def cache(rope, length):
        return GQA(d_model=HEAD, num_heads=1, rope=rope).init_cache(1, length, jnp.float32)

    for rope, length in ((fixed, 500), (by_call, 64), (always, 65), (RoPE(), 500)):
        assert cache(rope, length).capacity == length
    with pytest.raises(UserError, match="rope.length: null .* length=65"):
        cache(follows, 65)
    with pytest.raises(UserError, match="rope.use_long: null, and a cache of 65 tokens"):
        cache(by_call, 65)


@pytest.mark.parametrize(
    ("kind", "fields", "words"),
    [
        ("LinearRoPE", {"factor": 0.5}, "rope.factor: 0.5"),
        ("YaRN", {"original_max_position": 64, "beta_fast": 1.0, "beta_slow": 2.0}, "beta_slow=2.0"),
        ("YaRN", {"original_max_position": 0}, "original_max_position=0"),
        ("Llama3RoPE", {"original_max_position": 64, "low_freq_factor": 4.0}, "low_freq_factor=4.0"),
        ("LongRoPE", {"original_max_position": 64, "short_factor": (0.0,), "long_factor": (1.0,)}, "above 0"),
        ("DynamicNTKRoPE", {"max_position": 0}, "max_position=0"),
    ],
)
def test_wrong_settings_are_one_line(kind, fields, words):
    with pytest.raises(UserError, match=words) as caught:
        made(kind, fields)
    assert "\n" not in str(caught.value)


def test_settings_that_do_not_fit_the_head_are_refused_when_the_layer_is_made():
    with pytest.raises(UserError, match="long_factor: 3 numbers for 32 channels"):
        rope = LongRoPE(original_max_position=64, short_factor=(1.0,) * 16, long_factor=(1.0,) * 3)
        GQA(d_model=HEAD, num_heads=1, rope=rope)
    with pytest.raises(UserError, match="at least 4 channels"):
        GQA(d_model=4, num_heads=2, rope=NTKRoPE(factor=2.0))
