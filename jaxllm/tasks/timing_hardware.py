"""`time.parts=[hardware]`: what the machine itself does with plain work, on every kind of device that it has.

Three questions: how does the speed of a product depend on its size, batch and dtype; what does a branch that depends on data cost; and
what is an accelerator worth beside the processor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jaxllm.config import CONF
from jaxllm.measure.chips import Chip, detect
from jaxllm.measure.probe import measured
from jaxllm.measure.roofline import utilisation
from jaxllm.measure.settings import TimeSettings, listed
from jaxllm.measure.timing import compiled, peak_bytes, time_calls

BRANCH = 256  # rows and columns of the product that a branch may spare
WAYS = ("select", "cond", "switch", "while")


def hardware(settings: TimeSettings, chip: Chip, progress: Callable[[str], None]) -> Iterator[dict[str, Any]]:
    """Rows: `what` is matmul or branch, `layer` names the case, `device` where it ran."""
    for device in devices():
        mine = chip if device == jax.devices()[0] else measured(detect(device, CONF / "chip"))
        with jax.default_device(device):
            for dtype in listed(settings.dtype) or ("float32", "bfloat16"):
                for size in settings.sizes:
                    progress(f"timing products of {size} on {device.device_kind}, {dtype}")
                    yield from _products(settings, mine, device, dtype, size)
            progress(f"timing branches on {device.device_kind}")
            yield from _branches(settings, mine, device)


def devices() -> list[Any]:
    """One device of each kind: the accelerator first, then the processor."""
    first = jax.devices()[0]
    return [first] if first.platform == "cpu" else [first, jax.local_devices(backend="cpu")[0]]


def _products(settings: TimeSettings, chip: Chip, device: Any, dtype: str, size: int) -> list[dict[str, Any]]:
    """`[b, n] x [n, n]` for one row, a few, and a square: from reading a matrix to multiplying."""
    batches = dict.fromkeys((1, 8, 64, size))
    w = _drawn((size, size), dtype)
    calls, made = {}, {}
    for b in batches:
        x = _drawn((b, size), dtype)
        program, compile_s = compiled(lambda x, w: x @ w, x, w)
        calls[str(b)] = lambda program=program, x=x: program(x, w)
        made[b] = (program, compile_s)
    timings = time_calls(calls, settings.repeats)
    item = jnp.dtype(dtype).itemsize
    rows = []
    for b, (program, compile_s) in made.items():
        flops, moved = 2.0 * b * size * size, float((size * size + 2 * b * size) * item)
        row = {"what": "matmul", "layer": f"[{b}, {size}] x [{size}, {size}]", "batch": b, "size": size, "dtype": dtype}
        row |= _numbers(timings[str(b)], chip, flops, moved, dtype, compile_s, program)
        rows.append(row | {"device": device.device_kind})
    return rows


def _branches(settings: TimeSettings, chip: Chip, device: Any) -> list[dict[str, Any]]:
    """Work that only some rows need, decided by data: computed for all and selected, by a condition over all rows, by one choice of
    two a row, and as a loop of as many turns as rows need it. `share` of the rows, 0 or 1, takes the work."""
    w, x = _drawn((BRANCH, BRANCH), "float32"), _drawn((16, BRANCH), "float32")
    calls, made = {}, {}
    for way in WAYS:
        program, compile_s = compiled(_BRANCH_FORMS[way], x, w, jax.ShapeDtypeStruct((len(x),), jnp.bool_))
        made[way] = (program, compile_s)
        for share in (0, 1):
            need = jnp.full(len(x), bool(share))
            calls[f"{way} {share}"] = lambda program=program, need=need: program(x, w, need)
    timings = time_calls(calls, settings.repeats)
    rows = []
    for name, timing in timings.items():
        way, needed = name.split()
        program, compile_s = made[way]
        flops = 2.0 * len(x) * BRANCH * BRANCH * (1 if way == "select" else int(needed))
        row = {
            "what": "branch",
            "layer": way,
            "share": int(needed),
            "batch": len(x),
            "size": BRANCH,
            "dtype": "float32",
        }
        row |= _numbers(timing, chip, flops, float(4 * (w.size + 2 * x.size)), "float32", compile_s, program)
        rows.append(row | {"device": device.device_kind})
    return rows


def _select(x: Array, w: Array, need: Array) -> Array:
    return jnp.where(need[:, None], jnp.tanh(x @ w), x)


def _cond(x: Array, w: Array, need: Array) -> Array:
    return lax.cond(jnp.any(need), lambda: _select(x, w, need), lambda: x)


def _switch(x: Array, w: Array, need: Array) -> Array:
    def row(_: Any, item: tuple[Array, Array]) -> tuple[Any, Array]:
        x, wanted = item
        return (), lax.switch(wanted.astype(jnp.int32), [lambda: x, lambda: jnp.tanh(x @ w)])

    return lax.scan(row, (), (x, need))[1]


def _while(x: Array, w: Array, need: Array) -> Array:
    order = jnp.argsort(~need)

    def turn(state: tuple[Array, Array]) -> tuple[Array, Array]:
        n, y = state
        return n + 1, y.at[order[n]].set(jnp.tanh(x[order[n]] @ w))

    return lax.while_loop(lambda state: state[0] < jnp.sum(need), turn, (jnp.int32(0), x))[1]


_BRANCH_FORMS = {"select": _select, "cond": _cond, "switch": _switch, "while": _while}


def _drawn(shape: tuple[int, ...], dtype: str) -> Array:
    return jnp.asarray(np.random.default_rng(0).standard_normal(shape, np.float32) / shape[-1] ** 0.5, dtype)


def _numbers(
    timing: Any, chip: Chip, flops: float, moved: float, dtype: str, compile_s: float, program: Any
) -> dict[str, Any]:
    seconds, peak, bandwidth = timing.median_ms / 1e3, chip.peak(dtype), chip.bandwidth
    least = None if peak is None or bandwidth is None else max(flops / peak, moved / bandwidth)
    memory = least is not None and bandwidth is not None and least == moved / bandwidth
    return {
        "compile_s": round(compile_s, 3),
        "first_ms": timing.first_ms,
        "median_ms": timing.median_ms,
        "min_ms": timing.min_ms,
        "spread_ms": timing.spread_ms,
        "repeats": len(timing.samples_ms),
        "flops": flops,
        "bytes": moved,
        "flops_per_s": flops / seconds,
        "bytes_per_s": moved / seconds,
        "mfu": utilisation(flops, seconds, peak),
        "mbu": utilisation(moved, seconds, bandwidth),
        "predicted_ms": "n/a" if least is None else 1e3 * least,
        "limit": "n/a" if least is None else "memory" if memory else "compute",
        "reached": "n/a" if least is None else least / seconds,
        "peak_bytes": peak_bytes(program),
    }
