import types

import jax
import jax.numpy as jnp
import pytest

from jaxllm.errors import UserError
from jaxllm.measure.memory import check_room, free_bytes, saved_for_backward, shard_bytes, tree_bytes
from jaxllm.mesh import build_mesh


def test_what_a_backward_keeps():
    w = {"a": jax.ShapeDtypeStruct((8, 16), jnp.float32), "b": jax.ShapeDtypeStruct((16, 4), jnp.float32)}
    x = jax.ShapeDtypeStruct((32, 8), jnp.float32)

    def loss(w, x):
        return jnp.sum(jnp.exp(x @ w["a"]) @ w["b"])

    assert saved_for_backward(loss, w, x) == 32 * 16 * 4  # exp's result; x and the matrices exist anyway
    assert saved_for_backward(jax.checkpoint(loss), w, x) == 0


def test_depth_adds_and_remat_does_not():
    w = jax.ShapeDtypeStruct((6, 8, 8), jnp.float32)
    x = jax.ShapeDtypeStruct((4, 8), jnp.float32)

    def body(x, w):
        return (jnp.sin(x @ w), None)

    keep = saved_for_backward(lambda w, x: jnp.sum(jax.lax.scan(body, x, w)[0]), w, x)
    remat = saved_for_backward(
        lambda w, x: jnp.sum(jax.lax.scan(jax.checkpoint(body, prevent_cse=False), x, w)[0]), w, x
    )
    assert remat == 6 * 4 * 8 * 4  # the inputs of the six steps
    assert keep > remat


def test_bytes_of_a_share():
    mesh = build_mesh({"fsdp": 4})
    whole = jax.ShapeDtypeStruct((8, 6), jnp.bfloat16)
    part = jax.ShapeDtypeStruct((8, 6), jnp.float32, sharding=jax.NamedSharding(mesh, jax.P("fsdp")))
    assert tree_bytes([whole, part]) == 96 + 192
    assert shard_bytes([whole, part]) == 96 + 48
    assert shard_bytes([jax.device_put(jnp.zeros((8, 6)), part.sharding)]) == 48


def chip(**stats):
    return types.SimpleNamespace(platform="gpu", device_kind="toy chip", memory_stats=lambda: stats)


def test_what_does_not_fit_is_refused_in_one_line():
    assert free_bytes(chip(bytes_limit=8 * 2**30, bytes_in_use=3 * 2**30)) == 5 * 2**30
    check_room(2**40, chip(), "everything", "buy more")  # a device that does not tell is believed
    check_room(5 * 2**30, chip(bytes_limit=5 * 2**30), "parameters", "split them")
    with pytest.raises(UserError, match=r"6\.0 GiB are needed on each toy chip.*parameters.*5\.0 GiB are free; split"):
        check_room(6 * 2**30, chip(bytes_limit=5 * 2**30), "parameters", "split them")


def test_free_memory_of_the_host_is_shared_by_its_devices():
    free = free_bytes(jax.devices()[0])
    if free is None:
        pytest.skip("this system does not tell its free memory")
    assert 2**24 < free * len(jax.local_devices()) < 2**45
