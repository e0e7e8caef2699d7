"""What pages and the host cost: a decode step on pools of pages against one on contiguous caches, and the engine around both.

    python experiments/serving/decode.py [--layers 30] [--rows 8] [--context 1024] [--rounds 15] [--contexts 64 256 1024]

Random weights of SmolLM2-135M's shape. The two caches take turns, one step each, so that whatever else the machine does meets both;
the ratio is that of the medians, beside the ratio of the least, of the pairs, and of processor time, which others move least.
`host` is what an engine's step, 8 rows decoding, takes when its device calls return at once, and its share of a whole step. One JSON line.
"""

import argparse
import functools
import json
import statistics
import time
from typing import Any
from unittest import mock

import jax
import numpy as np

from jaxllm.backend import keep_freed_memory
from jaxllm.inference.engine import Engine
from jaxllm.inference.sampling import GREEDY
from jaxllm.inference.settings import EngineSettings
from jaxllm.layers.gqa import GQA
from jaxllm.layers.mlp import MLP
from jaxllm.layers.rope import RoPE
from jaxllm.model import LanguageModel
from jaxllm.params import init_params


def smollm2(layers: int, toy: bool = False) -> LanguageModel:
    """SmolLM2-135M where there are 30 layers; toy: as narrow as can be, to try the commands."""
    vocab, d, heads, kv = (256, 24, 3, 1) if toy else (49152, 576, 9, 3)
    return LanguageModel(
        vocab_size=vocab,
        d_model=d,
        layers=f"{layers}* global/dense",
        mixers={"global": functools.partial(GQA, num_heads=heads, num_kv_heads=kv, rope=RoPE(theta=100000.0))},
        ffns={"dense": functools.partial(MLP, d_ff=8 * d // 3)},
        tie_embeddings=True,
    )


def engine_of(model: LanguageModel, params: Any, cache: str, rows: int, length: int, **fields: Any) -> Engine:
    settings = EngineSettings(
        cache=cache,
        rows=rows,
        max_len=length,
        step_tokens=rows + 512,
        chunk=256,
        row_buckets=[rows],
        token_buckets=[256],
        width_buckets=[-(-length // fields.get("page_size", 16))],
        prompt_logprobs=False,
        **fields,
    )
    return Engine(model, params, None, settings)


def full_batch(engine: Engine, rows: int, context: int) -> Any:
    """Decoding at the end of a context, every row in pages of its own, in no order."""
    batch = engine.runner.batch(rows, 1, engine.sizes.widths[-1])
    batch.lengths[:], batch.new[:], batch.tokens[:] = context - 1, 1, 7
    batch.slots[:] = np.arange(rows) + (0 if engine.sizes.contiguous else 1)
    if not engine.sizes.contiguous:
        pages = np.random.default_rng(0).permutation(engine.sizes.pages - 1) + 1
        batch.table[:] = pages[: batch.table.size].reshape(batch.table.shape)
    return batch


def alternate(calls: dict[str, Any], rounds: int) -> dict[str, list[tuple[float, float]]]:
    """Seconds of each round and of the processor in it."""
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in calls}
    for i in range(rounds + 2):
        for name, call in calls.items():
            start, used = time.perf_counter(), time.process_time()
            call()
            if i >= 2:
                times[name].append((time.perf_counter() - start, time.process_time() - used))
    return times


def host_share(engine: Engine, rows: int, prompt: int, steps: int) -> dict[str, float]:
    """Of an engine that decodes `rows` rows: milliseconds of a step, of its work on the host, and the share of that."""
    for i in range(rows):
        engine.submit([3 + i] * prompt, GREEDY._replace(max_tokens=2 * steps + 40, ignore_eos=True))
    while any(r.left > 1 for r in engine.scheduler.running) or engine.scheduler.waiting or engine._inbox:
        engine.step()
    step = _least(engine.step, steps)
    ids = jax.block_until_ready((jax.numpy.full(rows, 7, jax.numpy.int32), jax.numpy.zeros(rows)))
    at_once = mock.patch.multiple(engine.runner, forward=lambda batch: None, draw=lambda *args: ids)
    with at_once:
        host = _least(engine.step, steps)
    for request in list(engine.scheduler.running):
        engine.abort(request)
    engine.step()
    return {"step_ms": 1e3 * step, "host_ms": 1e3 * host, "host": host / step}


def _least(call: Any, times: int) -> float:
    """Seconds of a call, in the best of three blocks: an engine's step waits for the one before, so single ones mean little."""
    best = float("inf")
    for _ in range(3):
        call()
        start = time.perf_counter()
        for _ in range(times // 3):
            call()
        best = min(best, (time.perf_counter() - start) / (times // 3))
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--page", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument(
        "--contexts", type=int, nargs="*", default=[], help="also a step at these lengths, each a JSON line"
    )
    parser.add_argument("--toy", action="store_true")
    args = parser.parse_args()
    keep_freed_memory()  # as the command line does
    model = smollm2(args.layers, args.toy)
    params = init_params(model, jax.random.key(0))
    engines = {
        "contiguous": engine_of(model, params, "contiguous", args.rows, args.context),
        "paged": engine_of(model, params, "paged", args.rows, args.context, page_size=args.page),
    }
    for context in args.contexts:
        print(json.dumps(compared(engines, args, context)))
    result = compared(engines, args, args.context)
    result["overhead"] = host_share(engines["paged"], args.rows, min(200, args.context // 4), args.rounds)
    print(json.dumps(result))


def compared(engines: dict[str, Engine], args: argparse.Namespace, context: int) -> dict[str, Any]:
    """A decode step of both engines, all rows at the end of a context."""
    batches = {name: full_batch(engine, args.rows, context) for name, engine in engines.items()}

    def step(name: str) -> None:
        jax.block_until_ready(engines[name].runner.forward(batches[name]))

    times = alternate({name: functools.partial(step, name) for name in engines}, args.rounds)
    result: dict[str, Any] = {"layers": args.layers, "rows": args.rows, "context": context, "page": args.page}
    for name, series in times.items():
        wall, cpu = zip(*series, strict=True)
        result[name] = {
            "median_ms": 1e3 * statistics.median(wall),
            "least_ms": 1e3 * min(wall),
            "cpu_ms": 1e3 * statistics.median(cpu),
        }
    for kind in ("median_ms", "least_ms", "cpu_ms"):
        result[f"ratio_{kind}"] = result["paged"][kind] / result["contiguous"][kind]
    pairs = [p[0] / c[0] for p, c in zip(times["paged"], times["contiguous"], strict=True)]
    result["ratio_pairs"] = [round(q, 3) for q in statistics.quantiles(pairs)]
    return result


if __name__ == "__main__":
    main()
