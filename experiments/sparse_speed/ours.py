"""Time and scratch memory of sparse latent attention against the length, part by part and beside dense; one JSON line a measurement.

    python experiments/sparse_speed/ours.py [prefill|decode|all] [--lengths 4096,8192,16384,32768] [--dense 32768] [--rows 1] [--repeats 3]

One layer's attention without its projections, float32, one row: 16 heads, latents of 512, 64 turned channels, 16 index heads of 64, 512
chosen keys. `prefill`: the indexer's choice and attention on what it chose, apart, and dense causal attention by the same heads. `decode`:
one token of each row behind a cache of each length, sparse and dense in turn: `layer`, the whole layer with prepared weights and a cache
that it writes to, and `attention`, from queries to the heads' values, without projections; each with index keys in float32 and in bfloat16
(`index_dtype`). The dense ones' bandwidth is printed as a share of what a plain sum over as many bytes reaches on this machine in the same
round.
"""

import argparse
import itertools
import json
import math
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jaxllm.backend import prepare
from jaxllm.compose import compose
from jaxllm.layers.base import Context
from jaxllm.layers.dsa import DSA
from jaxllm.layers.mla import MLA
from jaxllm.ops.blockwise import blockwise
from jaxllm.ops.latent import absorb, attend_latents, unabsorb
from jaxllm.ops.mask import CAUSAL
from jaxllm.ops.sparse_attention import attend_gathered
from jaxllm.ops.topk import select

H, R, TURNED, N, HEADS, WIDTH, TOP, D = 16, 512, 64, 128, 16, 64, 512, 1024
SIZES = {
    "num_heads": H,
    "q_lora_rank": 512,
    "kv_lora_rank": R,
    "qk_nope_head_dim": N,
    "qk_rope_head_dim": TURNED,
    "v_head_dim": N,
}
INDEX = {"top_k": TOP, "index_heads": HEADS, "index_head_dim": WIDTH}
INDEX_DTYPES = "float32", "bfloat16"
Program = tuple[Callable[..., Any], tuple[Any, ...], int]  # compiled, its arguments, bytes of scratch


def normal(seed: int, *shape: int) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape)


def compiled(f: Callable[..., Any], *arguments: Any, **options: Any) -> Program:
    program = jax.jit(f, **options).lower(*arguments).compile()
    return program, arguments, program.memory_analysis().temp_size_in_bytes


def prefill(t: int, dense: bool) -> dict[str, Program]:
    """Programs by part, of t tokens that see each other."""
    scored = normal(0, 1, t, HEADS, WIDTH), normal(1, 1, t, HEADS), normal(2, 1, t, WIDTH)
    reach = jnp.arange(1, t + 1, dtype=jnp.int32)[None]
    places = jax.random.randint(jax.random.key(3), (1, t, TOP), 0, reach[..., None])
    places = jnp.sort(places, axis=-1)  # as the indexer hands them over
    absorbed = normal(4, 1, t, H, R), normal(5, 1, t, H, TURNED), normal(6, 1, t, R), normal(7, 1, t, TURNED)
    out = {
        "indexer": compiled(lambda q, w, k, r: select(q, w, k, r, TOP, scale=WIDTH**-0.5), *scored, reach),
        "core": compiled(
            lambda a, b, c, k, i: attend_gathered((a, b), (c, k), None, i, scale=0.07)[0], *absorbed, places
        ),
    }
    if dense:
        heads = normal(8, 1, t, H, N + TURNED), normal(9, 1, t, H, N + TURNED), normal(10, 1, t, H, N)
        ones = jnp.ones((1, t), jnp.int32)
        at = jnp.arange(t, dtype=jnp.int32)[None]
        out["dense"] = compiled(lambda q, k, v: blockwise(q, k, v, at, ones, CAUSAL, scale=0.07), *heads)
    return out


def decode(s: int, rows: int) -> dict[str, Program]:
    """One token of each row behind a full cache of s, and a sum over as many bytes as dense attention reads."""
    out: dict[str, Program] = {}
    sparse_layers = {name: DSA(d_model=D, **SIZES, **INDEX, index_dtype=name) for name in INDEX_DTYPES}
    for name, layer in (*sparse_layers.items(), ("dense", MLA(d_model=D, **SIZES))):
        step = Context.step(jnp.zeros((rows, 1), jnp.int32), jnp.full(rows, s - 1))
        whole = Context.whole(jnp.zeros((rows, 8), jnp.int32))
        params = jax.tree.map(
            lambda box: box.value,
            layer.init(jax.random.key(1), normal(0, rows, 8, D), whole),
            is_leaf=lambda x: hasattr(x, "value"),
        )
        params = layer.prepare(params["params"])
        cache = jax.tree.map(
            lambda a: jax.random.normal(jax.random.key(2), a.shape, a.dtype), layer.init_cache(rows, s, jnp.float32)
        )

        def run(p: Mapping[str, Any], x: jax.Array, cache: Any, layer: MLA = layer, step: Context = step) -> Any:
            y, cache, _, _ = layer.apply({"params": p}, x, step, cache)
            return cache, y

        program, arguments, scratch = compiled(run, params, normal(3, rows, 1, D), cache, donate_argnums=2)
        out[f"layer {name}"] = held(program, arguments), (), scratch

    at = jnp.full((rows, 1), s - 1, jnp.int32)
    heads = normal(4, rows, 1, H, N), normal(5, rows, 1, H, TURNED), normal(6, rows, s, R), normal(7, rows, s, TURNED)
    up = normal(8, H, N, R), normal(9, H, R, N)
    scored = normal(10, rows, 1, HEADS, WIDTH), normal(11, rows, 1, HEADS), normal(12, rows, s, WIDTH)

    def sparse(heads: Any, up: Any, scored: Any, at: jax.Array) -> jax.Array:
        (q_n, q_r, latent, key), (up_k, up_v) = heads, up
        index = select(*scored, at + 1, TOP, scale=WIDTH**-0.5)
        q = absorb(q_n, up_k).transpose(0, 2, 1, 3)
        z = attend_gathered((q, q_r), (latent, key), None, index, scale=0.07)[0]
        return unabsorb(z.transpose(0, 2, 1, 3), up_v)

    def dense(heads: Any, up: Any, at: jax.Array) -> jax.Array:
        return attend_latents(*heads, *up, at, jnp.ones(at.shape, bool), scale=0.07)

    for name in INDEX_DTYPES:
        q, w, k = scored
        out[f"attention {name}"] = compiled(sparse, heads, up, (q.astype(name), w, k.astype(name)), at)
    out["attention dense"] = compiled(dense, heads, up, at)
    out["read"] = compiled(jnp.sum, normal(13, rows, s * (2 * R + TURNED)))
    return out


def held(program: Callable[..., Any], arguments: tuple[Any, ...]) -> Callable[..., Any]:
    """The step with its donated cache kept from call to call."""
    params, x, cache = arguments

    def call() -> Any:
        nonlocal cache
        cache, y = program(params, x, cache)
        return y

    return call


def timed(programs: Mapping[Any, Program], repeats: int) -> dict[Any, list[float]]:
    """Seconds by name; all take turns, round by round, and the first round is not counted."""
    seconds: dict[Any, list[float]] = {name: [] for name in programs}
    for repeat, (name, (program, arguments, _)) in itertools.product(range(repeats + 1), programs.items()):
        begun = time.perf_counter()
        jax.block_until_ready(program(*arguments))
        if repeat:
            seconds[name].append(time.perf_counter() - begun)
    return seconds


def exponent(lengths: list[int], times: Mapping[int, float]) -> float:
    """Slope of log time over log length, first to last."""
    return math.log(times[lengths[-1]] / times[lengths[0]]) / math.log(lengths[-1] / lengths[0])


def report_prefill(lengths: list[int], most: int, repeats: int) -> None:
    programs = {(part, t): p for t in lengths for part, p in prefill(t, t <= most).items()}
    seconds = timed(programs, repeats)
    best = {key: min(times) for key, times in seconds.items()}
    for (part, t), times in seconds.items():
        row = {"what": part, "tokens": t, "median_ms": 1e3 * statistics.median(times), "min_ms": 1e3 * min(times)}
        print(json.dumps({**row, "scratch_mib": programs[part, t][2] / 2**20}), flush=True)
    summary: dict[str, Any] = {
        part: exponent(lengths, {t: best[part, t] for t in lengths}) for part in ("core", "indexer")
    }
    both = [t for t in lengths if t <= most]
    ratios = {t: (best["core", t] + best["indexer", t]) / best["dense", t] for t in both}
    print(json.dumps({"exponent": summary, "sparse_over_dense": ratios}), flush=True)


def report_decode(lengths: list[int], rows: int, repeats: int) -> None:
    for s in lengths:
        seconds = timed(decode(s, rows), 5 * repeats)
        median, least = ({name: f(times) for name, times in seconds.items()} for f in (statistics.median, min))
        for part, name in itertools.product(("layer", "attention"), INDEX_DTYPES):
            sparse, dense = f"{part} {name}", f"{part} dense"
            row = {"what": f"decode {part}", "index_dtype": name, "context": s, "rows": rows}
            row |= {"sparse_ms": 1e3 * median[sparse], "dense_ms": 1e3 * median[dense]}
            row |= {
                "dense_over_sparse": median[dense] / median[sparse],
                "by_the_fastest": least[dense] / least[sparse],
            }
            print(json.dumps({**row, "dense_bandwidth_share": median["read"] / median[dense]}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("what", nargs="?", default="all", choices=("prefill", "decode", "all"))
    parser.add_argument("--lengths", default="4096,8192,16384,32768")
    parser.add_argument("--dense", type=int, default=32768, help="dense attention up to this length")
    parser.add_argument("--rows", type=int, default=1, help="of a decode step")
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    prepare(compose([]).common)
    lengths = [int(n) for n in args.lengths.split(",")]
    if args.what in ("decode", "all"):
        report_decode(lengths, args.rows, args.repeats)
    if args.what in ("prefill", "all"):
        report_prefill(lengths, args.dense, args.repeats)


if __name__ == "__main__":
    main()
