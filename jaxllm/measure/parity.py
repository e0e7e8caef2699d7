"""Do the fast paths of `ops/` agree with their naive twins on the device that is here? One JSON line; exit code 1 where one does not.

    python -m jaxllm.measure.parity [--small]

The tests hold every fast path to its twin on CPU; kernels of GPUs and TPUs run only there. Twins compute in float32 with full precision.
Each case compares the output and the gradients of all inputs, by the largest difference over the largest value.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.ops.cross_entropy import chunked_cross_entropy, naive_cross_entropy
from jaxllm.ops.delta import delta_rule
from jaxllm.ops.experts import Experts, Unit, experts_dense, experts_few
from jaxllm.ops.experts_ragged import experts_ragged
from jaxllm.ops.experts_sorted import experts_sorted
from jaxllm.ops.kernels import attention
from jaxllm.ops.mask import Mask
from jaxllm.ops.sparse_attention import attend_gathered, attend_masked

# float32 with full precision: sums in another order. Half precision: 8 bits of mantissa, some roundings one after another.
ALLOWED = {"float32": 2e-4, "bfloat16": 4e-2}
NARROW = ("cudnn",)  # kernels that compute in half precision only

Form = Callable[..., Any]


class Case(NamedTuple):
    """A fast path, its twin, the inputs that are differentiated, and the dtype in which the fast path is given them."""

    name: str
    fast: Form
    twin: Form
    inputs: Sequence[np.ndarray]
    dtype: str = "float32"


def cases(small: bool = False, platform: str | None = None) -> Iterator[Case]:
    """Those that this platform has. small: of a few tokens, for trying the program."""
    platform = jax.default_backend() if platform is None else platform
    rng = np.random.default_rng(0)

    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape, np.float32)

    yield from _attention(normal, 32 if small else 512, 16 if small else 64, platform)
    yield from _delta(normal, 32 if small else 512, 16 if small else 64)
    yield from _experts(normal, rng, 16 if small else 512, small)
    hidden, w = normal(2, 16 if small else 256, 32), normal(32, 64 if small else 4096)
    labels, ones = rng.integers(0, w.shape[1], hidden.shape[:2]), np.ones(hidden.shape[:2], np.float32)

    def loss(form: Form, **more: Any) -> Form:
        return lambda hidden, w: form(hidden, w, labels, ones, valid_vocab=w.shape[1], **more)[0]

    yield Case("cross-entropy chunked", loss(chunked_cross_entropy, chunk=16), loss(naive_cross_entropy), (hidden, w))


def _attention(normal: Any, t: int, k: int, platform: str) -> Iterator[Case]:
    """Packed rows, with and without a window; the kernel of the platform beside those that run anywhere."""
    arrays = normal(2, t, 4, k), normal(2, t, 2, k), normal(2, t, 2, k)
    segments = jnp.asarray(np.stack([np.ones(t), np.where(np.arange(t) < t // 3, 1, 2)]), jnp.int32)
    first = jnp.asarray([[0], [t // 3]], jnp.int32)
    positions = jnp.arange(t)[None] - jnp.where(segments == 2, first, 0)
    own = {"gpu": "cudnn", "cuda": "cudnn", "tpu": "splash"}.get(platform)
    for mask in (Mask(), Mask(window=t // 4)):

        def by(kernel: str, mask: Mask = mask) -> Form:
            return lambda q, k, v: attention(
                q, k, v, positions, segments, mask, scale=k.shape[-1] ** -0.5, kernel=kernel
            )

        kind = "causal" if mask.window is None else "window"
        for kernel in filter(None, ("xla", "blockwise", own)):
            dtype = "bfloat16" if kernel in NARROW else "float32"
            yield Case(f"attention {kernel} {kind}", by(kernel), by("naive"), arrays, dtype)
    index = jnp.asarray(
        np.sort(np.argsort(np.random.default_rng(1).random((2, t, t)), axis=-1)[..., : t // 4], axis=-1)
    )

    def gathered(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return attend_gathered((q,), (k[:, :, 0],), v[:, :, 0], index, scale=0.1)[0]

    def masked(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return attend_masked(q, k[:, None, :, 0], v[:, None, :, 0], index, scale=0.1)[0]

    yield Case("attention gathered", gathered, masked, arrays)


def _delta(normal: Any, t: int, k: int) -> Iterator[Case]:
    def unit(x: np.ndarray) -> np.ndarray:
        return x / np.linalg.norm(x, axis=-1, keepdims=True)

    q, key, v = unit(normal(2, t, 2, k)), unit(normal(2, t, 2, k)), normal(2, t, 2, k)
    g, beta = -0.3 * np.abs(normal(2, t, 2, k)), 1 / (1 + np.exp(-normal(2, t, 2)))

    def by(kernel: str) -> Form:
        return lambda *parts: delta_rule(*parts, kernel=kernel, chunk=16 if t < 64 else 64, bounded=True)

    for kernel in ("chunk", "pallas"):
        yield Case(f"delta rule {kernel}", by(kernel), by("recurrent"), (q, key, v, np.maximum(g, -4.9), beta))


def _experts(normal: Any, rng: Any, n: int, small: bool) -> Iterator[Case]:
    d, f, e, k = (16, 8, 4, 2) if small else (128, 64, 16, 4)
    chosen = jnp.asarray(np.stack([rng.permutation(e)[:k] for _ in range(n)]), jnp.int32)
    arrays = (
        normal(n, d),
        np.abs(normal(n, k)),
        normal(e, d, f) / d**0.5,
        normal(e, d, f) / d**0.5,
        normal(e, f, d) / f**0.5,
    )

    def by(form: Form) -> Form:
        return lambda x, p, gate, up, down: form(x, chosen, p, Experts(gate, up, down), Unit())

    for name, form in (("few", experts_few), ("sorted", experts_sorted), ("ragged", experts_ragged)):
        yield Case(f"experts {name}", by(form), by(experts_dense), arrays)


def compare(case: Case) -> dict[str, Any]:
    """JSON: the case, its largest relative difference over output and gradients, what is allowed, whether it holds.

    A fast path in half precision is given rounded inputs; so is its twin, in float32. A kernel that raises does not hold.
    """
    rounded = [jnp.asarray(x, case.dtype) for x in case.inputs]

    def run(form: Form, inputs: Sequence[jax.Array]) -> list[np.ndarray]:
        def scalar(*args: jax.Array) -> tuple[jax.Array, Any]:
            out = jax.tree.leaves(form(*args))
            # Weighted, so that no part of the gradient cancels.
            parts = [jnp.sum(o.astype(jnp.float32) * jnp.cos(jnp.arange(o.size)).reshape(o.shape)) for o in out]
            return sum(parts, jnp.float32(0.0)), out

        call = jax.jit(jax.value_and_grad(scalar, argnums=range(len(inputs)), has_aux=True))
        (_, out), grads = call(*inputs)
        return [np.asarray(x, np.float32) for x in (*out, *grads)]

    result: dict[str, Any] = {"case": case.name, "dtype": case.dtype, "allowed": ALLOWED[case.dtype]}
    try:
        with jax.default_matmul_precision("highest"):
            want = run(case.twin, [x.astype(jnp.float32) for x in rounded])
            got = run(case.fast, rounded)
    except Exception as error:
        return result | {"ok": False, "error": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}
    worst = max(float(np.abs(g - w).max() / max(np.abs(w).max(), 1e-6)) for g, w in zip(got, want, strict=True))
    return result | {"max_error": worst, "ok": bool(worst <= ALLOWED[case.dtype])}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Compare every fast path with its naive twin on this device.")
    parser.add_argument("--small", action="store_true", help="few tokens, to try the program")
    found = [compare(case) for case in cases(parser.parse_args(argv).small)]
    for one in found:
        print(
            f"{'ok ' if one['ok'] else 'BAD'} {one['case']}: {one.get('max_error', one.get('error'))}", file=sys.stderr
        )
    device = jax.devices()[0]
    ok = all(one["ok"] for one in found)
    print(json.dumps({"device": device.device_kind, "jax": jax.__version__, "ok": ok, "cases": found}))
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
