"""The parity check that runs on a GPU: it holds here, and it finds what is wrong."""

import numpy as np
import pytest

from jaxllm.measure.parity import Case, cases, compare

SMALL = {case.name: case for case in cases(small=True)}


def test_it_covers_every_fast_path_and_the_kernel_of_the_platform():
    assert {name.split()[0] for name in SMALL} == {"attention", "delta", "experts", "cross-entropy"}
    gpu = {case.name: case.dtype for case in cases(small=True, platform="gpu")}
    assert gpu["attention cudnn causal"] == gpu["attention cudnn window"] == "bfloat16"
    assert "attention splash causal" in {case.name for case in cases(small=True, platform="tpu")}


@pytest.mark.parametrize("name", ["attention gathered", "delta rule chunk", "experts ragged"])
def test_fast_paths_agree_here(name):
    found = compare(SMALL[name])
    assert found["ok"] and 0 <= found["max_error"] < found["allowed"], found


def test_a_wrong_value_a_wrong_gradient_and_a_crash_are_found():
    import jax
    import jax.numpy as jnp

    def broken(x):
        raise ValueError("no such kernel\nhere")

    x = np.ones((3, 4), np.float32)
    twin = jnp.sin
    for fast in (lambda x: 1.001 * jnp.sin(x), lambda x: jnp.sin(x) + jax.lax.stop_gradient(x) - x):
        found = compare(Case("x", fast, twin, (x,)))
        assert not found["ok"] and found["max_error"] > found["allowed"]
    assert compare(Case("x", broken, twin, (x,)))["error"] == "ValueError: no such kernel here"
    assert compare(Case("x", lambda x: jnp.sin(x), twin, (x,), "bfloat16"))["ok"]
