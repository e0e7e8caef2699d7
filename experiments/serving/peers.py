"""The engine beside the continuous batching of others: one trace of requests, all in turn, each in a process of its own.

    python experiments/serving/peers.py transformers=PYTHON vllm=PYTHON [--layers 30] [--requests 32] [--rows 8] [--rounds 3] [--page 16]

A PYTHON has transformers >= 5 and torch, or vllm. All get random weights of SmolLM2-135M's shape in float32, the same prompts and lengths
of answers (of `task=bench_serve`), pages, rows and tokens of a step, and as many threads as there are processors. While one runs the
others wait for their turn. One JSON line: output tokens a second (median of the rounds, and all of them), ours over each, and the
median time to the first token.
"""

import argparse
import contextlib
import json
import os
import statistics
import subprocess
from pathlib import Path
from typing import Any

import jax
from batching import ride
from decode import smollm2

from jaxllm.backend import keep_freed_memory
from jaxllm.inference.bench import Job, trace
from jaxllm.inference.engine import Engine
from jaxllm.inference.sampling import GREEDY
from jaxllm.inference.settings import BenchSettings, EngineSettings
from jaxllm.params import init_params

LENGTH = 768  # prompt and answer of the longest request


class Peer:
    """Another process: a line in, a line out."""

    def __init__(self, name: str, python: str, arguments: dict[str, Any]):
        script = Path(__file__).with_name(f"peer_{name}.py")
        words = [word for key, value in arguments.items() for word in (f"--{key}", str(value))]
        self.process = subprocess.Popen(
            [python, str(script), *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def ride(self, jobs: list[Job]) -> dict[str, float]:
        assert self.process.stdin is not None and self.process.stdout is not None
        line = json.dumps({"jobs": [[[int(t) for t in job.prompt], job.output] for job in jobs]})
        answer = ""
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(line + "\n")
            self.process.stdin.flush()
            answer = self.process.stdout.readline()
        if not answer:
            raise SystemExit("the peer has ended; its messages are above")
        result: dict[str, float] = json.loads(answer)
        return result

    def end(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(60)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("peers", nargs="+", metavar="NAME=PYTHON", help="transformers or vllm, and what runs it")
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--page", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    keep_freed_memory()  # as the command line does
    step, threads = args.rows + 256, len(os.sched_getaffinity(0))
    pages = args.rows * -(-LENGTH // args.page)
    sizes = {"layers": args.layers, "rows": args.rows, "page": args.page, "pages": pages, "step-tokens": step}
    pythons = dict(peer.split("=", 1) for peer in args.peers)
    peers = {name: Peer(name, python, sizes | {"threads": threads}) for name, python in pythons.items()}
    model = smollm2(args.layers)
    params: Any = init_params(model, jax.random.key(0))
    settings = EngineSettings(
        rows=args.rows, max_len=LENGTH, page_size=args.page, step_tokens=step, chunk=256, prompt_logprobs=False
    )
    engine = Engine(model, params, None, settings)
    engine.runner.warm_up(scores=False)
    jobs = trace(BenchSettings(requests=args.requests, warm_up=0), args.seed, engine.vocab_size)
    engine.generate([[1] * 40], GREEDY._replace(max_tokens=4, ignore_eos=True))
    for peer in peers.values():
        peer.ride(jobs[:2])
    rates: dict[str, list[float]] = {name: [] for name in ("jaxllm", *peers)}
    first: dict[str, list[float]] = {name: [] for name in rates}
    new = sum(job.output for job in jobs)
    for _ in range(args.rounds):
        engine.arrange()  # an empty cache: nothing is reused from the round before
        for name in rates:
            result = peers[name].ride(jobs) if name in peers else ride(engine, jobs)
            assert result.get("new_tokens", new) == new, (
                f"{name} has answered with {result['new_tokens']} tokens, not {new}"
            )
            rates[name].append(round(new / result["seconds"], 2))
            first[name].append(round(result["ttft_p50"], 3))
    for peer in peers.values():
        peer.end()
    middle = {name: statistics.median(values) for name, values in rates.items()}
    print(
        json.dumps(
            {
                **vars(args),
                "peers": list(peers),
                "tokens_per_s": middle,
                "ratio": {name: round(middle["jaxllm"] / middle[name], 3) for name in peers},
                "rounds_tokens_per_s": rates,
                "rounds_ttft_p50_s": first,
            }
        )
    )


if __name__ == "__main__":
    main()
