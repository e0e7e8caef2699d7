"""A bus against a shared ride: static and continuous batching on the same requests, and what else changes an engine's speed.

    python experiments/serving/batching.py [--source FOLDER | --layers 30] [--requests 32] [--rows 8] [--study batching|prefix|chunk|rows]

Without a source: random weights of SmolLM2-135M's shape. One engine, so that every variant runs the same compiled calls; all requests
wait from the start; variants take turns, `--rounds` times, and the best round of each counts. One JSON line a variant:

    batching   static and reserve; with the ideal ratio of the trace (steps of the longest of each batch / steps of rows never idle), and
               what it leaves of time when the prompts, which both compute, are added
    prefix     prompts with the first 128 tokens in common, reuse off and on
    chunk      the longest piece of a prompt in one step: TTFT against the gaps that others feel
    rows       requests at once, 1 to --rows, the next one where another has ended: the frontier of throughput against TTFT and TPOT
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
from decode import smollm2

from jaxllm.backend import keep_freed_memory
from jaxllm.inference.bench import Job, ideal_ratio, trace
from jaxllm.inference.engine import Engine
from jaxllm.inference.requests import Request
from jaxllm.inference.sampling import GREEDY
from jaxllm.inference.settings import BenchSettings, EngineSettings
from jaxllm.params import init_params
from jaxllm.tasks.source import open_source


def made(args: argparse.Namespace) -> Engine:
    if args.source is None:
        model, tokenizer = smollm2(args.layers, args.toy), None
        params: Any = init_params(model, jax.random.key(0))
    else:
        source = open_source(args.source)
        model, params, tokenizer = source.model, source.params, source.tokenizer
    # A static batch keeps its shape until its last answer has ended, as it does where batches are padded: one bucket of rows.
    several = args.study == "rows" and not args.toy
    rows = sorted({1, 2, 4, args.rows} & set(range(args.rows + 1))) if several else [args.rows]
    settings = EngineSettings(
        rows=args.rows, max_len=768, step_tokens=args.rows + 256, chunk=256, token_buckets=[256] if args.toy else [32, 64, 128, 256],
        row_buckets=rows, prompt_logprobs=False, queue=4096,
    )  # fmt: skip
    engine = Engine(model, params, tokenizer, settings)
    engine.runner.warm_up(scores=False)
    return engine


def ride(engine: Engine, jobs: list[Job], rows: int | None = None) -> dict[str, float]:
    """All jobs at once, or `rows` of them at a time; what it took."""
    waiting, requests, gaps = list(reversed(jobs)), [], []
    last: dict[int, float] = {}
    start, live, steps = time.monotonic(), 0, engine.steps
    while waiting or live:
        while waiting and (rows is None or live < rows):
            job = waiting.pop()
            requests += engine.submit(job.prompt, GREEDY._replace(max_tokens=job.output, ignore_eos=True))
            live += 1
        for event in engine.step():
            now, number = time.monotonic(), event.request.number
            if event.tokens:
                gaps += [now - last[number]] if number in last else []
                last[number] = now
            live -= event.finish is not None
    seconds = time.monotonic() - start
    return numbers(requests, gaps, seconds, engine.steps - steps)


def numbers(requests: list[Request], gaps: list[float], seconds: float, steps: int) -> dict[str, float]:
    first = [r.first - r.arrival for r in requests if r.first is not None]
    new = sum(len(r.outputs) for r in requests)
    gaps = gaps or [0.0]  # answers of one token have none
    return {
        "seconds": seconds,
        "steps": steps,
        "throughput": new / seconds,
        "ttft_p50": float(np.median(first)),
        "ttft_p99": float(np.percentile(first, 99)),
        "itl_p50": float(np.median(gaps)),
        "itl_p99": float(np.percentile(gaps, 99)),
        "cached_tokens": sum(r.cached for r in requests),
    }


def ratios(engine: Engine, jobs: list[Job], rows: int, best: dict[str, dict[str, float]]) -> dict[str, float]:
    """Of static over continuous batching: the ideal of the trace by steps; the same of time, to which both add the prompts, that
    nobody saves; what was measured; and its share of the second."""
    engine.arrange(policy="reserve")
    prompts = ride(engine, [Job(job.prompt, 1) for job in jobs])["seconds"]
    ideal = ideal_ratio([job.output for job in jobs], rows)
    decoding = best["static"]["seconds"] - prompts
    ideal_time = best["static"]["seconds"] / (prompts + decoding / ideal)
    measured = best["static"]["seconds"] / best["continuous"]["seconds"]
    return {
        "ideal_ratio": ideal,
        "ideal_time_ratio": ideal_time,
        "time_ratio": measured,
        "step_ratio": best["static"]["steps"] / best["continuous"]["steps"],
        "prompts_s": prompts,
        "reached": measured / ideal_time,
    }


def variants(study: str, rows: int) -> dict[str, tuple[dict[str, Any], int | None]]:
    """Name -> changed settings, and how many requests may be there at a time."""
    if study == "batching":
        return {"static": ({"policy": "static"}, None), "continuous": ({"policy": "reserve"}, None)}
    if study == "prefix":
        return {"prefix_off": ({"prefix_cache": False}, None), "prefix_on": ({"prefix_cache": True}, None)}
    if study == "chunk":
        return {f"chunk_{n}": ({"chunk": n, "step_tokens": rows + n}, None) for n in (32, 64, 128, 256)}
    return {f"rows_{n}": ({}, n) for n in (1, 2, 4, 8, 16, 32) if n <= rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", type=Path)
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--toy", action="store_true", help="a model as narrow as can be, to try the command")
    parser.add_argument("--study", default="batching", choices=("batching", "prefix", "chunk", "rows"))
    args = parser.parse_args()
    keep_freed_memory()  # as the command line does
    engine = made(args)
    prefix = 128 if args.study == "prefix" else 0
    load = BenchSettings(requests=args.requests, warm_up=0, prompt_min=max(16, prefix + 1), prefix=prefix)
    jobs = trace(load, args.seed, engine.vocab_size)
    engine.generate([[1] * 40], GREEDY._replace(max_tokens=4, ignore_eos=True))
    best: dict[str, dict[str, float]] = {}
    choices = variants(args.study, args.rows)
    for _ in range(args.rounds):
        for name, (changes, rows) in choices.items():
            engine.arrange(**changes)
            result = ride(engine, jobs, rows)
            if name not in best or result["seconds"] < best[name]["seconds"]:
                best[name] = result
    for name, result in best.items():
        made_of = {"layers": args.layers, "requests": args.requests, "rounds": args.rounds}
        print(json.dumps({"variant": name, **made_of, **{k: round(v, 4) for k, v in result.items()}}))
    if args.study == "batching":
        print(json.dumps({key: round(value, 3) for key, value in ratios(engine, jobs, args.rows, best).items()}))


if __name__ == "__main__":
    main()
