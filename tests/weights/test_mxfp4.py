"""gpt-oss as it was released: experts of four bits, against values made one by one, and a folder of them as a model."""

import json

import ml_dtypes
import numpy as np
import pytest
from golden_models import GOLDEN
from safetensors.numpy import load_file, save_file

from jaxllm.errors import UserError
from jaxllm.weights.choose import choose
from jaxllm.weights.family import leaves
from jaxllm.weights.load import build, read_model
from jaxllm.weights.mxfp4 import expand
from jaxllm.weights.open import open_tensors

D, F, E = 32, 64, 4
STEM = "model.layers.{}.mlp.experts."


def number(nibble):
    """Sign, two bits of exponent with bias 1, one of mantissa: the format's definition."""
    sign, exponent, mantissa = nibble >> 3, nibble >> 1 & 3, nibble & 1
    size = mantissa / 2 if exponent == 0 else (1 + mantissa / 2) * 2.0 ** (exponent - 1)
    return -size if sign else size


def by_hand(blocks, scales):
    """`[.. g 16], [.. g] -> [.. 32 g]`, byte by byte."""
    out = np.zeros((*scales.shape, 32))
    for at in np.ndindex(blocks.shape):
        byte, scale = int(blocks[at]), 2.0 ** (int(scales[at[:-1]]) - 127)
        out[at[:-1]][2 * at[-1]] = scale * number(byte & 15)
        out[at[:-1]][2 * at[-1] + 1] = scale * number(byte >> 4)
    return out.reshape(*scales.shape[:-1], -1)


def packed(rng, n, inputs):
    blocks = rng.integers(0, 256, (E, n, inputs // 32, 16), np.uint8)
    return blocks, rng.integers(120, 126, blocks.shape[:-1], np.uint8)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """(packed, full): the golden gpt-oss with experts that fill whole blocks, in four bits and written out."""
    rng, tensors = np.random.default_rng(0), load_file(GOLDEN / "gpt_oss" / "model.safetensors")
    small, full = dict(tensors), dict(tensors)
    for layer in range(2):
        stem = STEM.format(layer)
        for name, n, inputs in (("gate_up_proj", 2 * F, D), ("down_proj", D, F)):
            blocks, scales = packed(rng, n, inputs)
            del small[stem + name]
            small |= {f"{stem}{name}_blocks": blocks, f"{stem}{name}_scales": scales}
            full[stem + name] = np.ascontiguousarray(by_hand(blocks, scales).transpose(0, 2, 1)).astype(np.float32)
        bias = {f"{stem}gate_up_proj_bias": rng.standard_normal((E, 2 * F), np.float32)}
        small |= bias
        full |= bias
    config = json.loads((GOLDEN / "gpt_oss" / "config.json").read_text()) | {"intermediate_size": F}
    method = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    made = []
    for name, held, more in (("packed", small, {"quantization_config": method}), ("full", full, {})):
        folder = tmp_path_factory.mktemp(name)
        save_file(held, folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps(config | more))
        made.append(folder)
    return made


def spoiled(folder, out, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, out / "model.safetensors")
    (out / "config.json").write_text((folder / "config.json").read_text())
    return out


def test_every_nibble_and_scale_is_the_formats_own_number():
    blocks = np.arange(256, dtype=np.uint8).reshape(2, 8, 16)
    scales = np.array([[0, 1, 100, 126, 127, 128, 200, 252]] * 2, np.uint8)
    got = expand(blocks, scales)
    assert got.dtype == np.float32
    np.testing.assert_array_equal(got, by_hand(blocks, scales).astype(np.float32))
    np.testing.assert_array_equal(got.astype(ml_dtypes.bfloat16).astype(np.float32), got)  # nothing to round


def test_four_bits_are_read_as_what_they_mean(folders):
    said = []
    (node, got), (same, want) = (read_model(open_tensors(folder), warn=said.append) for folder in folders)
    assert said == [] and node == same
    got, want = leaves(got), leaves(want)
    assert got.keys() == want.keys() and np.abs(want["g0/b0/ffn/gate_proj"]).max() > 0.1
    for path in want:
        np.testing.assert_array_equal(got[path], want[path], err_msg=path)
    source = open_tensors(folders[0])
    assert source.dtype(STEM.format(0) + "down_proj").name == "bfloat16"
    assert set(source.names()) == set(open_tensors(folders[1]).names())
    assert "quantization_config" not in choose(build(node), source.config).config  # written in full again


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (lambda t, n: t.pop(n + "_scales"), "_scales is missing; .*_blocks means nothing without it"),
        (lambda t, n: t.update({n + "_blocks": t[n + "_blocks"][..., :8].copy()}), r"expected shape .* found \[4, 32, 2, 8\]"),
        (lambda t, n: t.update({n + "_scales": t[n + "_scales"].astype(np.int32)}), "expected uint8, found int32"),
        (lambda t, n: t[n + "_scales"].fill(255), "scales that are no number"),
        (lambda t, n: t.update({n + end: np.repeat(t[n + end], 2, axis=1) for end in ("_blocks", "_scales")}),
         r"down_proj: expected shape \[4, 64, 32\], found \[4, 64, 64\]"),
    ],
    ids=["scales", "blocks", "type", "nan", "shape"],
)  # fmt: skip
def test_broken_ones_are_one_line(folders, tmp_path, change, line):
    name = STEM.format(1) + "down_proj"
    with pytest.raises(UserError, match=line) as error:
        read_model(open_tensors(spoiled(folders[0], tmp_path, lambda tensors: change(tensors, name))))
    assert "\n" not in str(error.value) and name in str(error.value)
