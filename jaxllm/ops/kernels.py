"""Attention of whole sequences by any of several kernels, under one name each.

| name | what it is | where |
| --- | --- | --- |
| naive | one score matrix a head: the truth that the others are tested against | short sequences |
| xla | score matrices of a few causal blocks (`jaxllm.ops.attention`) | anywhere, up to `LONG` tokens |
| blockwise | online softmax, memory linear in the length (`jaxllm.ops.blockwise`) | anywhere |
| cudnn | `jax.nn.dot_product_attention(implementation="cudnn")` | NVIDIA GPUs, in half precision |
| splash | the Pallas kernel of `jax.experimental.pallas.ops.tpu` | TPUs; interpreted, and slow, elsewhere |

`auto` takes the platform's own kernel where it can do what the layer asks, else `xla` or `blockwise` by length; `choose` says which and
why. A kernel that was named and cannot do it is refused.
"""

import importlib
import logging
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from jaxllm.errors import UserError
from jaxllm.mesh import shard_map_over
from jaxllm.ops.attention import attend, attention_naive, causal_blocks
from jaxllm.ops.blockwise import blockwise
from jaxllm.ops.mask import Mask, visible

KERNELS = ("auto", "naive", "xla", "blockwise", "cudnn", "splash")
LONG = 1024  # tokens; measured on CPU: up to here one score matrix a block is as fast as online softmax, at 2048 it is half as fast
DENSE = 4096  # tokens up to which cuDNN may be handed a mask of packed documents, which it wants whole
_SPLASH = "jax.experimental.pallas.ops.tpu.splash_attention"
_log = logging.getLogger(__name__)


def check_kernel(name: str) -> None:
    if name not in KERNELS:
        raise UserError(f"kernel: {name!r} is not one of {', '.join(KERNELS)}")


def _cudnn_lacks(q: Array, v: Array, mask: Mask, softcap: float | None, sinks: Array | None) -> str | None:
    """Why cuDNN cannot do it, or None."""
    k, width = q.shape[-1], v.shape[-1]
    if softcap is not None:
        return "it has no softcap"
    if sinks is not None:
        return "it has no sinks"
    if k != width or k % 8 or k > 128:
        return f"it wants equal key and value widths, a multiple of 8 up to 128, not {k} and {width}"
    if q.dtype not in (jnp.bfloat16, jnp.float16):
        return f"it computes in bfloat16 or float16, not {q.dtype}"
    if q.shape[1] > DENSE and mask not in (Mask(), Mask(window=mask.window)):
        return "beyond a window it wants a whole mask, which is too large for a long sequence"
    return None


def _splash_lacks(q: Array, k: Array, v: Array, mask: Mask) -> str | None:
    """Why the splash kernel cannot do it, or None."""
    if mask not in (Mask(), Mask(window=mask.window)):
        return "it knows causal masks and windows only"
    if jax.default_backend() == "tpu" and (q.shape[-1] % 128 or v.shape[-1] % 128):
        return f"it wants widths that are multiples of 128, not {q.shape[-1]} and {v.shape[-1]}"
    mesh = jax.sharding.get_abstract_mesh()
    ways = 1 if mesh.empty else mesh.shape.get("tensor", 1)
    if k.shape[2] % ways:
        return f"{k.shape[2]} kv heads do not divide over {ways} devices"
    return None


def choose(
    kernel: str,
    q: Array,
    k: Array,
    v: Array,
    mask: Mask,
    softcap: float | None = None,
    sinks: Array | None = None,
    *,
    platform: str | None = None,
) -> tuple[str, str]:
    """The kernel for `q [b t h k]`, `k [b t g k]`, `v [b t g v]` (shapes and dtypes are enough), and the reason."""
    check_kernel(kernel)
    platform = jax.default_backend() if platform is None else platform
    own = {"gpu": "cudnn", "cuda": "cudnn", "tpu": "splash"}.get(platform) if kernel == "auto" else kernel
    lacks = None
    if own == "cudnn":
        lacks = _cudnn_lacks(q, v, mask, softcap, sinks)
        if lacks is None and kernel == "cudnn" and platform not in ("gpu", "cuda"):
            lacks = f"it runs on NVIDIA GPUs, not on {platform}"
    elif own == "splash":
        lacks = _splash_lacks(q, k, v, mask)
    if own is not None and lacks is None:
        return own, "asked for" if kernel != "auto" else f"the kernel of {platform}"
    if kernel != "auto":
        raise UserError(f"kernel: {kernel} cannot do this layer: {lacks}; take auto or blockwise")
    t = q.shape[1]
    name = "xla" if t <= LONG else "blockwise"
    return name, f"{t} tokens" + (f"; not {own}: {lacks}" if own else "")


def attention(
    q: Array,
    k: Array,
    v: Array,
    positions: Array,
    segments: Array,
    mask: Mask,
    *,
    scale: float,
    softcap: float | None = None,
    sinks: Array | None = None,
    kernel: str = "auto",
) -> Array:
    """`q [b t h k]`, `k [b t g k]`, `v [b t g v]` of whole sequences -> `[b t h v]`; `positions, segments [b t]`, `sinks [h]`."""
    name, why = choose(kernel, q, k, v, mask, softcap, sinks)
    _log.debug("attention of %s by %s: %s", q.shape, name, why)
    if name == "cudnn":
        return cudnn(q, k, v, positions, segments, mask, scale=scale)
    if name == "splash":
        return splash(q, k, v, segments, mask, scale=scale, softcap=softcap, sinks=sinks)
    if name == "blockwise":
        return blockwise(q, k, v, positions, segments, mask, scale=scale, softcap=softcap, sinks=sinks)
    seen = visible(positions, positions, segments, segments, mask)
    if name == "naive":
        return attention_naive(q, k, v, seen, scale=scale, softcap=softcap, sinks=sinks)
    blocks, span = causal_blocks(q.shape[1]), None if mask.global_tokens else mask.span
    return attend(q, k, v, seen, scale=scale, softcap=softcap, sinks=sinks, causal_blocks=blocks, span=span)


def cudnn(
    q: Array,
    k: Array,
    v: Array,
    positions: Array,
    segments: Array,
    mask: Mask,
    *,
    scale: float,
    implementation: Any = "cudnn",
    dense: int = DENSE,
) -> Array:
    """FlashAttention of cuDNN. It knows windows and lengths, but documents only as a whole mask `[b 1 t t]`: longer sequences look at
    their segments as they run, and packed ones go blockwise."""
    valid = segments > 0

    def masked(q: Array, k: Array, v: Array) -> Array:
        seen = visible(positions, positions, segments, segments, mask)[:, None]
        return jax.nn.dot_product_attention(q, k, v, mask=seen, scale=scale, implementation=implementation)

    def alone(q: Array, k: Array, v: Array) -> Array:
        lengths = jnp.sum(valid, axis=1, dtype=jnp.int32)
        return jax.nn.dot_product_attention(
            q,
            k,
            v,
            scale=scale,
            is_causal=True,
            query_seq_lengths=lengths,
            key_value_seq_lengths=lengths,
            local_window_size=None if mask.window is None else (mask.window - 1, 0),
            implementation=implementation,
        )

    def packed(q: Array, k: Array, v: Array) -> Array:
        return blockwise(q, k, v, positions, segments, mask, scale=scale)

    if q.shape[1] <= dense:
        out = masked(q, k, v)
    else:
        one = (
            jnp.all((segments == segments[:, :1]) | ~valid)
            & jnp.all(valid[:, 0])
            & jnp.all(valid[:, :-1] | ~valid[:, 1:])
        )
        out = lax.cond(one, alone, packed, q, k, v)
    return jnp.where(valid[:, :, None, None], out, 0)


def splash(
    q: Array,
    k: Array,
    v: Array,
    segments: Array,
    mask: Mask,
    *,
    scale: float,
    softcap: float | None = None,
    sinks: Array | None = None,
) -> Array:
    """Splash attention. Its masks go by index, which among tokens of one document is the same as by position."""
    try:
        module = importlib.import_module(_SPLASH)
    except ImportError as error:
        raise UserError(
            f"kernel: this JAX {jax.__version__} has no splash attention ({error}); take blockwise"
        ) from None
    b, t, h, _ = q.shape
    size = 512 if t >= 512 else 128
    extra = -t % size
    q, k, v = (jnp.pad(x, ((0, 0), (0, extra), (0, 0), (0, 0))).transpose(0, 2, 1, 3) for x in (q * scale, k, v))
    segments = jnp.pad(segments, ((0, 0), (0, extra)))
    n = t + extra
    window = None if mask.window is None or mask.window >= n else mask.window - 1
    one = module.CausalMask((n, n)) if window is None else module.LocalMask((n, n), (window, 0), 0)
    blocks = module.BlockSizes(
        block_q=size,
        block_kv=size,
        block_kv_compute=size,
        block_q_dkv=size,
        block_kv_dkv=size,
        block_kv_dkv_compute=size,
        block_q_dq=size,
        block_kv_dq=size,
    )

    def local(q: Array, k: Array, v: Array, segments: Array, sinks: Array | None) -> Array:
        kernel = module.make_splash_mha_single_device(
            module.MultiHeadMask([one] * q.shape[1]),
            block_sizes=blocks,
            attn_logits_soft_cap=softcap,
            interpret=jax.default_backend() != "tpu",
        )

        def call(q: Array, k: Array, v: Array, s: Array) -> Array:
            return kernel(q, k, v, segment_ids=module.SegmentIds(q=s, kv=s), sinks=sinks)

        return jax.vmap(call)(q, k, v, segments)

    mesh = jax.sharding.get_abstract_mesh()
    if not mesh.empty and math.prod(mesh.shape.values()) > 1:  # XLA cannot split a Pallas call by itself
        heads = ("batch", "act_heads", None, None)
        kv = heads if k.shape[1] > 1 else ("batch", None, None, None)
        axes = (heads, kv, kv, ("batch", None), None if sinks is None else ("heads",))
        local = shard_map_over(local, axes, heads, check_vma=False)
    out = local(q, k, v, segments, sinks)
    return jnp.where((segments > 0)[:, None, :, None], out, 0).transpose(0, 2, 1, 3)[:, :t].astype(v.dtype)
