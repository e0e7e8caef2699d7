"""Files written tensor by tensor are those that the safetensors package reads."""

import weakref

import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file

from jaxllm.weights.safetensors_file import write_safetensors

SHAPES = {"b.weight": (3, 5), "a": (), "last": (2, 1, 7), "empty": (0, 4)}


def drawn(dtype):
    rng = np.random.default_rng(0)
    return {name: rng.standard_normal(shape).astype(dtype) for name, shape in SHAPES.items()}


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.float64, ml_dtypes.bfloat16])
def test_the_package_reads_what_was_written(tmp_path, dtype):
    path, tensors = tmp_path / "x.safetensors", drawn(dtype)
    write_safetensors(path, SHAPES, np.dtype(dtype), tensors.items())
    read = load_file(path)
    assert read.keys() == tensors.keys()
    for name, array in tensors.items():
        assert read[name].dtype == dtype and read[name].shape == array.shape
        assert read[name].tobytes() == array.tobytes()
    with safe_open(path, "np") as file:
        assert file.metadata() == {"format": "pt"}
    assert int.from_bytes(path.read_bytes()[:8], "little") % 8 == 0


def test_rows_of_a_transposed_array_are_written_in_order(tmp_path):
    array = np.arange(6, dtype=np.float32).reshape(2, 3).T
    write_safetensors(tmp_path / "x", {"x": (3, 2)}, array.dtype, [("x", array)])
    np.testing.assert_array_equal(load_file(tmp_path / "x")["x"], array)


def test_a_tensor_is_dropped_before_the_next_is_made(tmp_path):
    alive = []

    def made():
        for name in ("x", "y", "z"):
            assert sum(ref() is not None for ref in alive) <= 1
            array = np.ones((4, 4), np.float32)
            alive.append(weakref.ref(array))
            yield name, array
            del array

    write_safetensors(tmp_path / "x", dict.fromkeys(("x", "y", "z"), (4, 4)), np.dtype(np.float32), made())
    assert len(alive) == 3


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ([("y", np.zeros(2, np.float32))], "y .* is not the tensor that comes next"),
        ([("x", np.zeros(3, np.float32))], r"x float32\[3\] is not"),
        ([("x", np.zeros(2, np.float64))], r"x float64\[2\] is not"),
        ([], "x never came"),
        ([("x", np.zeros(2, np.float32))] * 2, "is not the tensor that comes next"),
    ],
)
def test_what_is_not_as_the_header_says_is_refused(tmp_path, tensors, words):
    with pytest.raises(ValueError, match=words):
        write_safetensors(tmp_path / "x", {"x": (2,)}, np.dtype(np.float32), tensors)
