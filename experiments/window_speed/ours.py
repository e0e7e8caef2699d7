"""Time and scratch memory of one attention layer against the length, with a window and without; one JSON line a measurement.

    python experiments/window_speed/ours.py [--lengths 4096,8192,16384,32768] [--window 512] [--full 8192] [--repeats 5]

The layer: d 256, 4 heads of 64, forward and backward of the sum of its output, float32, one row. `full`: lengths up to this one are
also timed without a window. Lengths are timed in turn, round by round, so that a slow minute of the machine meets all of them.
`memory` is the compiler's plan of scratch space, without parameters, inputs and outputs.
"""

import argparse
import itertools
import json
import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp

from jaxllm.backend import prepare
from jaxllm.compose import compose
from jaxllm.layers.base import Context
from jaxllm.layers.gqa import GQA

D, HEADS, HEAD_DIM = 256, 4, 64


def compiled(n: int, window: int | None) -> tuple[Any, tuple[Any, ...], int]:
    """(program, its arguments, bytes of scratch)."""
    layer = GQA(d_model=D, num_heads=HEADS, num_kv_heads=HEADS, head_dim=HEAD_DIM, window=window)
    x = jax.random.normal(jax.random.key(0), (1, n, D))
    ctx = Context.whole(jnp.zeros((1, n), jnp.int32), train=True)
    params = layer.init(jax.random.key(1), x[:, :8], Context.whole(jnp.zeros((1, 8), jnp.int32)))

    def loss(params: Any, x: jax.Array, ctx: Context) -> jax.Array:
        return jnp.sum(layer.apply(params, x, ctx)[0])

    program = jax.jit(jax.value_and_grad(loss, argnums=(0, 1))).lower(params, x, ctx).compile()
    return program, (params, x, ctx), program.memory_analysis().temp_size_in_bytes


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--lengths", default="4096,8192,16384,32768")
    parser.add_argument("--window", type=int, default=512)
    parser.add_argument("--full", type=int, default=8192)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    prepare(compose([]).common)
    lengths = [int(n) for n in args.lengths.split(",")]
    cases = [(args.window, n) for n in lengths] + [(None, n) for n in lengths if n <= args.full]
    programs = {case: compiled(case[1], case[0]) for case in cases}
    seconds: dict[Any, list[float]] = {case: [] for case in cases}
    for repeat, case in itertools.product(range(args.repeats + 1), cases):
        program, arguments, _ = programs[case]
        begun = time.perf_counter()
        jax.block_until_ready(program(*arguments))
        if repeat:  # the first call touches its memory for the first time
            seconds[case].append(time.perf_counter() - begun)
    before: dict[Any, tuple[float, int]] = {}
    for (window, n), times in seconds.items():
        median, memory = statistics.median(times), programs[window, n][2]
        line = {"window": window, "n": n, "median_ms": round(median * 1e3, 1), "min_ms": round(min(times) * 1e3, 1)}
        line |= {"max_ms": round(max(times) * 1e3, 1), "memory_mib": round(memory / 2**20, 1)}
        if window in before:
            line |= {
                "time_ratio": round(median / before[window][0], 2),
                "memory_ratio": round(memory / before[window][1], 2),
            }
        before[window] = (median, memory)
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
