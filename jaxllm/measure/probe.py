"""How fast this machine's processor is: a short matmul, reading and copying, kept in the user's cache folder.

Taken at first use and read from the file after that, so that a roofline does not move between two runs; delete the file to measure
again. Best of several tries: a roofline says what is possible, and other programs on the machine only make a try slower. Where others
keep half of the cores busy, the result serves this run alone and is not kept.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import platform
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.measure.chips import Chip

SIZE, TRIES = 1024, 25  # of the matmul: 2 GFLOP, a few hundredths of a second on two cores
STREAM = 2**26  # bytes that are read or copied: far beyond every cache


def measured(chip: Chip, file: Path | None = None, log: Callable[[str], None] = lambda text: None) -> Chip:
    """The chip with this machine's numbers in the place of those that it lacks. file: where they are kept."""
    if not chip.measured:
        return chip
    file = cache_file() if file is None else file
    facts = _saved(file)
    if facts is None:
        facts = probe()
        busy = facts["load"] > facts["cores"] / 2
        kept = "not kept, since other programs are running" if busy else f"kept in {file}"
        log(f"chip: this processor was measured ({_rates(facts)}); {kept}")
        if not busy:
            _save(facts, file)
    return dataclasses.replace(
        chip,
        matmul={**facts["matmul"], **chip.matmul},
        bandwidth=chip.bandwidth or facts["bandwidth"],
        memory=chip.memory or facts["memory"],
    )


def cache_file() -> Path:
    """One file for each kind of processor, number of cores and version of jax."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    facts = f"{platform.machine()} {_processor()} {_cores()} {jax.__version__}"
    return base / "jaxllm" / "chips" / f"cpu-{hashlib.sha256(facts.encode()).hexdigest()[:12]}.json"


def probe(size: int = SIZE, stream: int = STREAM, tries: int = TRIES) -> dict[str, Any]:
    """`matmul` FLOP/s by dtype; bytes/s that one row times a matrix reads (`bandwidth`: what a decode step does) and that a copy moves
    (`copy`); `memory` bytes; the machine's `load`."""
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    device = jax.local_devices(backend="cpu")[0]
    with jax.default_device(device):
        rates = {name: _matmul(name, size, tries) for name in ("float32", "bfloat16")}
        read, copy = _read(stream, tries), _copy(stream, tries)
    return {
        "matmul": rates,
        "bandwidth": read,
        "copy": copy,
        "memory": _memory(),
        "processor": _processor(),
        "cores": _cores(),
        "load": round(load, 2),
        "jax": jax.__version__,
    }


def _matmul(dtype: str, size: int, tries: int) -> float:
    a = jnp.asarray(np.random.default_rng(0).standard_normal((size, size)), dtype)
    return 2 * size**3 / _best(jax.jit(lambda a: a @ a), tries, a)


def _read(stream: int, tries: int) -> float:
    """One row times a matrix that no cache holds: how a decode step reads its weights. Wide, as the fastest of them are."""
    rows = min(1024, stream // 16)
    w, x = jnp.ones((rows, stream // (4 * rows)), jnp.float32), jnp.ones((1, rows), jnp.float32)
    return w.nbytes / _best(jax.jit(lambda x, w: x @ w), tries, x, w)


def _copy(stream: int, tries: int) -> float:
    """`a + 1`: every byte is read and another written."""
    a = jnp.zeros(stream // 4, jnp.float32)
    return 2 * stream / _best(jax.jit(lambda a: a + 1), tries, a)


def _best(call: Callable[..., Any], tries: int, *arguments: Any) -> float:
    jax.block_until_ready(call(*arguments))
    seconds = []
    for _ in range(tries):
        start = time.perf_counter()
        jax.block_until_ready(call(*arguments))
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def _saved(file: Path) -> Mapping[str, Any] | None:
    """What an earlier probe left; None where there is nothing that can be read."""
    try:
        facts = json.loads(file.read_text(encoding="utf-8"))
        fit = all(float(v) > 0 for v in (*facts["matmul"].values(), facts["bandwidth"], facts["memory"]))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return facts if fit else None


def _save(facts: Mapping[str, Any], file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_suffix(f".{os.getpid()}")
    partial.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    partial.replace(file)


def _rates(facts: Mapping[str, Any]) -> str:
    speeds = ", ".join(f"{name} {rate / 1e9:,.0f} GFLOP/s" for name, rate in facts["matmul"].items())
    return f"{speeds}, {facts['bandwidth'] / 1e9:,.1f} GB/s"


def _memory() -> float:
    return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
