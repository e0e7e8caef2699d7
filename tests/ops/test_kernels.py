import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxllm.errors import UserError
from jaxllm.layers.base import Context
from jaxllm.mesh import build_mesh, use_mesh
from jaxllm.ops.attention import attention_naive
from jaxllm.ops.kernels import DENSE, KERNELS, LONG, attention, choose, cudnn
from jaxllm.ops.mask import Mask, visible

T, FULL, WINDOW = 40, Mask(), Mask(window=9)


def inputs(t=T, b=2, h=4, g=2, k=8):
    keys = jax.random.split(jax.random.key(0), 5)
    shapes = (b, t, h, k), (b, t, g, k), (b, t, g, k), (h,), (b, t, h, k)
    return [jax.random.normal(key, shape) for key, shape in zip(keys, shapes, strict=True)]


def rows(packed):
    tail = [1] * 12 + [2] * 20 + [0] * 8 if packed else [1] * 32 + [0] * 8
    segments = jnp.array([[1] * T, tail])
    return Context.whole(jnp.zeros((2, T), jnp.int32), segments)


def naive(q, k, v, ctx, mask, **kwargs):
    seen = visible(ctx.positions, ctx.positions, ctx.segments, ctx.segments, mask)
    return attention_naive(q, k, v, seen, scale=0.3, **kwargs)


def arrays(t=64, h=4, g=2, k=64, v=64, dtype=jnp.bfloat16):
    return [jax.ShapeDtypeStruct((1, t, heads, width), dtype) for heads, width in ((h, k), (g, k), (g, v))]


def test_auto_goes_by_platform_then_by_length():
    def pick(t=64, platform="cpu", mask=FULL, softcap=None, sinks=None, **shapes):
        return choose("auto", *arrays(t, **shapes), mask, softcap, sinks, platform=platform)

    assert pick()[0] == "xla" and pick(LONG)[0] == "xla" and pick(LONG + 1)[0] == "blockwise"
    assert pick(platform="gpu")[0] == pick(platform="gpu", t=2 * DENSE, mask=WINDOW)[0] == "cudnn"
    assert pick(platform="tpu", k=128, v=128)[0] == "splash"
    for why, changed in {
        "no softcap": {"softcap": 2.0},
        "no sinks": {"sinks": jnp.zeros(4)},
        "widths": {"v": 32},
        "float32": {"dtype": jnp.float32},
        "whole mask": {"t": 2 * DENSE, "mask": Mask(chunk=8)},
    }.items():
        name, reason = pick(platform="gpu", **changed)
        assert name in ("xla", "blockwise") and "not cudnn" in reason and why in reason
    assert "causal masks and windows only" in pick(platform="tpu", mask=Mask(chunk=8))[1]


def test_a_named_kernel_is_taken_or_refused():
    for name in KERNELS[1:4]:
        assert choose(name, *arrays(), Mask())[0] == name
    with pytest.raises(UserError, match="kernel: cudnn cannot do this layer: it has no softcap"):
        choose("cudnn", *arrays(), Mask(), 2.0, platform="gpu")
    with pytest.raises(UserError, match="not on cpu"):
        choose("cudnn", *arrays(), Mask(), platform="cpu")
    with pytest.raises(UserError, match="kernel: 'flash' is not one of"):
        choose("flash", *arrays(), Mask())


@pytest.mark.parametrize("mask", [Mask(), WINDOW], ids=str)
def test_what_cudnn_is_asked_for_is_the_naive_form(mask):
    """The arguments, run by the same function's XLA implementation: a whole mask, and lengths with a window for single documents."""
    q, k, v, _, _ = inputs()
    for dense, packed in ((T, True), (0, True), (0, False)):
        ctx = rows(packed)
        call = jax.jit(
            lambda q, k, v, ctx=ctx, dense=dense: cudnn(
                q, k, v, ctx.positions, ctx.segments, mask, scale=0.3, implementation="xla", dense=dense
            )
        )
        np.testing.assert_allclose(call(q, k, v), naive(q, k, v, ctx, mask), atol=1e-5)


def test_kernels_agree_on_a_mesh_of_rows_and_heads():
    """Splash interpreted, with its Pallas calls split by hand, and the XLA forms split by the compiler, on 2 x 2 x 2 devices."""
    q, k, v, sinks, _ = inputs(b=4)
    ctx = jax.tree.map(lambda x: jnp.tile(x, (2, 1)), rows(packed=True))
    scores = {"scale": 0.3, "softcap": 2.0}
    mesh = build_mesh({"data": 2, "fsdp": 2, "tensor": 2})

    def put(x, *axes):
        return jax.device_put(x, NamedSharding(mesh, PartitionSpec(*axes)))

    split = [put(x, ("data", "fsdp"), None, "tensor", None) for x in (q, k, v)] + [put(sinks, "tensor")]

    @jax.jit
    def run(q, k, v, sinks):
        at = ctx.positions, ctx.segments, WINDOW
        return [attention(q, k, v, *at, sinks=sinks, kernel=n, **scores) for n in ("xla", "blockwise", "splash")]

    with use_mesh(mesh):
        got = run(*split)
    want = naive(q, k, v, ctx, WINDOW, softcap=2.0, sinks=sinks)
    for each in got:
        assert each.sharding.spec == split[0].sharding.spec
        np.testing.assert_allclose(each, want, atol=2e-5)
