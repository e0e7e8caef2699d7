"""The receptive field of stacked windows is what arithmetic says, and the pictures show the masks that layers compute with."""

import functools

import numpy as np
import pytest

from jaxllm.errors import UserError
from jaxllm.layers.gqa import GQA
from jaxllm.layers.mlp import MLP
from jaxllm.measure import masks
from jaxllm.model import LanguageModel
from jaxllm.ops.mask import Mask

N, W = 24, 4
LAYER = functools.partial(GQA, num_heads=2)


def stack(layers, **fields):
    mixers = {"local": functools.partial(LAYER, **fields), "dense": LAYER}
    ffns = {"mlp": functools.partial(MLP, d_ff=16)}
    return LanguageModel(vocab_size=N, d_model=16, layers=layers, mixers=mixers, ffns=ffns, dtype="float32")


@pytest.fixture(scope="module")
def fields():
    return {
        "3 windows": masks.influence(stack("3* local/mlp", window=W), N),
        "2 windows, 1 dense": masks.influence(stack("2* local/mlp | dense/mlp", window=W), N),
    }


def test_stacked_windows_reach_layers_times_window(fields):
    t, reach = np.arange(1, N + 1), 1 + 3 * (W - 1)
    np.testing.assert_array_equal(masks.reached(fields["3 windows"]), np.minimum(t, reach))
    np.testing.assert_array_equal(fields["3 windows"] > 0, masks.pattern(Mask(window=reach), N))
    np.testing.assert_array_equal(masks.reached(fields["2 windows, 1 dense"]), t)


def test_one_layer_reaches_its_own_mask_and_needs_tokens_that_differ():
    mask = {"window": 3, "dilation": 2, "global_tokens": 2}
    model = stack("local/mlp", **mask)
    np.testing.assert_array_equal(masks.influence(model, N) > 0, masks.pattern(Mask(**mask), N))
    with pytest.raises(UserError, match="25 tokens that differ"):
        masks.influence(model, N + 1)


def test_pictures_are_written_and_say_what_they_show(fields, tmp_path):
    for path in masks.pictures(tmp_path / "plots", fields):
        assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n" and path.stat().st_size > 20_000
    assert {path.name for path in (tmp_path / "plots").iterdir()} == {"masks.png", "receptive_field.png"}
    figure = masks.mask_figure({"window": Mask(window=2)}, n=4)
    assert "1.8 keys a query" in figure.axes[0].get_xlabel()  # (1 + 2 + 2 + 2) / 4
    drawn = np.ma.filled(figure.axes[0].images[0].get_array(), 0) > 0
    np.testing.assert_array_equal(drawn, masks.pattern(Mask(window=2), 4))
    figure = masks.receptive_figure(fields)
    assert "10 of 24 tokens" in figure.axes[0].get_xlabel() and "24 of 24 tokens" in figure.axes[1].get_xlabel()
