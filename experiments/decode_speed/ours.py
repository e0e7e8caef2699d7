"""Decode and prefill speed of SmolLM2-135M on this machine, one JSON line a measurement.

    python experiments/decode_speed/ours.py [--source FILE] [--dtype float32] [--batches 1,8] [--repeats 3]

Greedy, 64-token prompts of pseudo-random ids, 128 new tokens, the end token ignored. decode: batch / median time between two
tokens as the host sees them, which stands stalls of a shared machine; prefill: 512 tokens / time to the first token. Nothing is
compiled while it is timed. `share` is the part of the memory's read bandwidth (measured here, by the largest of 512 MB) that reading
the weights once a step makes up.
"""

import argparse
import json
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxllm.backend import prepare as prepare_backend
from jaxllm.compose import compose
from jaxllm.inference.generate import Generator
from jaxllm.inference.sampling import GREEDY
from jaxllm.tasks.source import open_source

SOURCE = Path(__file__).resolve().parents[2] / ".cache" / "smollm2" / "SmolLM2-135M-Instruct.Q4_1.gguf"
PROMPT, NEW, PREFILL = 64, 128, 512


def prompt_ids(length: int, batch: int) -> list[list[int]]:
    """Fixed pseudo-random ids by a linear congruential generator, so that any program can make the same ones."""
    x, rows = 12345, []
    for _ in range(batch):
        row = []
        for _ in range(length):
            x = (1103515245 * x + 12345) % 2**31
            row.append(100 + (x >> 8) % (40000 - 100))
        rows.append(row)
    return rows


def read_bandwidth() -> float:
    """Bytes a second that two threads read: the best of five passes over 512 MB."""
    halves = np.ones((2, 2**26), np.float32)
    with ThreadPoolExecutor(2) as pool:
        seconds = []
        for _ in range(5):
            start = time.perf_counter()
            list(pool.map(np.max, halves))
            seconds.append(time.perf_counter() - start)
    return halves.nbytes / min(seconds)


def decode(generator: Generator, weights: Any, prompts: list[list[int]]) -> tuple[float, list[int]]:
    """(median seconds between tokens, the first eight tokens of the first row)."""
    rows, stats = generator.generate(weights, prompts, max_new_tokens=NEW, sampling=GREEDY, ignore_eos=True)
    return stats.tpot_s, rows[0].tokens[:8]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--source", default=str(SOURCE))
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--batches", default="1,8")
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    prepare_backend(compose([]).common)
    begun = time.perf_counter()
    source = open_source(args.source)
    params = jax.tree.map(lambda a: np.asarray(a).astype(args.dtype), source.params)
    model = source.model.clone(dtype=args.dtype, param_dtype=args.dtype)
    generator = Generator(model)
    bandwidth = read_bandwidth()
    report("load", args, seconds=round(time.perf_counter() - begun, 2), read_gb_s=round(bandwidth / 1e9, 1))
    for batch in map(int, args.batches.split(",")):
        weights = generator.prepare(params, rows=batch)
        size = sum(leaf.nbytes for leaf in jax.tree.leaves(weights))
        prompts = prompt_ids(PROMPT, batch)
        generator.warm_up(weights, batch=batch, max_prompt=PROMPT, max_new_tokens=NEW)
        runs = [decode(generator, weights, prompts) for _ in range(args.repeats)]
        median = statistics.median(seconds for seconds, _ in runs)
        report(
            "decode",
            args,
            batch=batch,
            tokens_per_s=round(batch / median, 1),
            runs=[round(batch / seconds, 1) for seconds, _ in runs],
            share=round(size / median / bandwidth, 2),
            first_tokens=runs[0][1],
        )
        if batch == 1:
            prefill(generator, weights, args)
        del weights


def prefill(generator: Generator, weights: Any, args: argparse.Namespace) -> None:
    prompts = prompt_ids(PREFILL, 1)

    def take():
        return generator.generate(weights, prompts, max_new_tokens=1, sampling=GREEDY)[1].ttft_s

    take()
    runs = [PREFILL / take() for _ in range(args.repeats)]
    report("prefill", args, tokens_per_s=round(statistics.median(runs), 1), runs=[round(run, 1) for run in runs])


def report(bench: str, args: argparse.Namespace, **facts: Any) -> None:
    print(json.dumps({"bench": bench, "jax": jax.__version__, "dtype": args.dtype, **facts}), flush=True)


if __name__ == "__main__":
    main()
