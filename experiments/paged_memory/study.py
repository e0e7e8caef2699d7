"""How much of a cache's memory holds tokens: three ways of reserving contiguous rows, and pages, on one trace of requests in one pool.

    python experiments/paged_memory/study.py [--requests 2000] [--out FOLDER]

No device: contiguous policies use a buddy allocator, as the paper's baselines do; paging runs the engine's own scheduler and page
manager. The queue never empties, each step every running request gets one token, and what each token place of the pool is used for is
counted at every step: tokens, reserved (a token will come), internal waste (none ever will), external waste (free, but in pieces too
small for the next request). Writes `memory.png` and `table.md`.
"""

import argparse
import dataclasses
from collections import Counter
from pathlib import Path

import numpy as np

from jaxllm.inference.blocks import Identity
from jaxllm.inference.paging import Places
from jaxllm.inference.requests import Request
from jaxllm.inference.sampling import SamplingParams
from jaxllm.inference.scheduler import Scheduler

POOL, LONGEST, PAGE = (
    16_384,
    2_048,
    16,
)  # tokens; the paper's OPT-13B on one A100 has a pool of 15.7 thousand and the same longest sequence
PAPER = {"max": 20.4, "pow2": 26.8, "oracle": 38.2, "paged": 96.3}  # arXiv 2309.06180, figure 2
COLOURS = {"tokens": "#2a9d8f", "reserved": "#e9c46a", "internal": "#e76f51", "external": "#b0b0b0"}


@dataclasses.dataclass(frozen=True)
class Job:
    prompt: int
    output: int


def trace(count: int, seed: int) -> list[Job]:
    """Lengths like those of shared conversations: log-normal, mean prompt about 160, mean answer about 340, cut to the longest sequence."""
    rng = np.random.default_rng(seed)

    def draw(mean: float, sigma: float) -> np.ndarray:
        return rng.lognormal(np.log(mean) - sigma**2 / 2, sigma, count).astype(int)

    prompts, outputs = np.clip(draw(161, 1.1), 4, 1024), np.clip(draw(338, 0.9), 1, 1000)
    return [Job(int(p), int(o)) for p, o in zip(prompts, outputs, strict=True)]


class Buddy:
    """Contiguous blocks of powers of two, split and merged in pairs (Knowlton 1965)."""

    def __init__(self, size: int):
        self.size, self.free = size, {size: {0}}

    def take(self, want: int) -> tuple[int, int] | None:
        """(start, length) of the smallest free block that holds `want`, halved as far as it goes; None if there is none."""
        need = 1 << max(want - 1, 0).bit_length()
        sizes = [n for n, starts in self.free.items() if n >= need and starts]
        if not sizes:
            return None
        size = min(sizes)
        start = min(self.free[size])
        self.free[size].remove(start)
        while size > need:
            size //= 2
            self.free.setdefault(size, set()).add(start + size)
        return start, size

    def give(self, start: int, size: int) -> None:
        while size < self.size and start ^ size in self.free.get(size, ()):
            self.free[size].remove(start ^ size)
            start, size = min(start, start ^ size), 2 * size
        self.free.setdefault(size, set()).add(start)

    @property
    def free_tokens(self) -> int:
        return sum(n * len(starts) for n, starts in self.free.items())


def reserve(policy: str, job: Job) -> int:
    """Token places that a contiguous policy sets aside for a request when it comes."""
    if policy == "max":
        return LONGEST
    if policy == "pow2":  # does not know the answer's length, but its power of two
        return job.prompt + (1 << max(job.output - 1, 0).bit_length())
    return job.prompt + job.output


def contiguous(policy: str, jobs: list[Job], steps: int) -> tuple[Counter, list[float], int, float]:
    """What the pool's places were used for over all steps; utilisation by step; requests finished; mean rows."""
    buddy, waiting, running = Buddy(POOL), list(reversed(jobs)), []
    use: Counter = Counter()
    series, finished, rows = [], 0, 0
    for _ in range(steps):
        while waiting and (block := buddy.take(reserve(policy, waiting[-1]))):
            running.append([waiting.pop(), 0, block])
        assert waiting, "the trace is too short for so many steps"
        for row in running:
            row[1] += 1
        now: Counter = Counter(external=buddy.free_tokens)
        for job, made, (_, size) in running:
            held = job.prompt + made
            now["tokens"] += held
            now["reserved"] += job.output - made
            now["internal"] += size - job.prompt - job.output
        use += now
        series.append(now["tokens"] / POOL)
        rows += len(running)
        for row in [r for r in running if r[1] >= r[0].output]:
            running.remove(row)
            buddy.give(*row[2])
            finished += 1
    return use, series, finished, rows / steps


def paged(jobs: list[Job], steps: int, page: int = PAGE) -> tuple[Counter, list[float], int, float]:
    """The same through the engine's scheduler (optimistic policy): a page is all that is ever reserved."""
    scheduler = Scheduler(
        Places(POOL // page + 1, page, 512, reuse=False), budget=8192, chunk=LONGEST, policy="optimistic"
    )
    coming = iter(jobs)
    use: Counter = Counter()
    series, finished, rows = [], 0, 0
    for _ in range(steps):
        while len(scheduler.waiting) < 4:
            job = next(coming)
            params = SamplingParams(max_tokens=job.output)
            scheduler.add(Request([0] * job.prompt, params, 0, Identity()))
        scheduler.plan()
        for request in [r for r in scheduler.running if r.drawn]:  # the device answers at once
            request.tokens.append(0)
            request.drawn -= 1
        now: Counter = Counter(external=scheduler.places.free_pages * page)
        for request in scheduler.running:
            assert request.place is not None
            now["tokens"] += request.computed
            now["reserved"] += len(request.place.pages) * page - request.computed
        use += now
        series.append(now["tokens"] / POOL)
        rows += len(scheduler.running)
        for request in [r for r in scheduler.running if len(r.tokens) >= r.limit]:
            scheduler.remove(request)
            finished += 1
    return use, series, finished, rows / steps


def run(steps: int, seeds: int, count: int) -> dict[str, list[tuple[Counter, list[float], int, float]]]:
    out: dict[str, list[tuple[Counter, list[float], int, float]]] = {name: [] for name in PAPER}
    for seed in range(seeds):
        jobs = trace(count, seed)
        for name in ("max", "pow2", "oracle"):
            out[name].append(contiguous(name, jobs, steps))
        out["paged"].append(paged(jobs, steps))
    return out


def shares(use: Counter) -> dict[str, float]:
    total = sum(use.values())
    return {name: 100 * use[name] / total for name in COLOURS}


def table(results: dict[str, list[tuple[Counter, list[float], int, float]]]) -> str:
    lines = [
        "| policy | tokens % | the paper's | reserved % | internal % | external % | rows | finished |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, runs in results.items():
        parts = [shares(r[0]) for r in runs]
        held = [p["tokens"] for p in parts]
        mean = {key: np.mean([p[key] for p in parts]) for key in COLOURS}
        rest = " | ".join(f"{mean[key]:.1f}" for key in ("reserved", "internal", "external"))
        rows, done = np.mean([r[3] for r in runs]), np.mean([r[2] for r in runs])
        lines.append(
            f"| {name} | {np.mean(held):.1f} ({min(held):.1f} to {max(held):.1f}) | {PAPER[name]} | {rest} | {rows:.1f} | {done:.0f} |"
        )
    return "\n".join(lines) + "\n"


def draw(results: dict[str, list[tuple[Counter, list[float], int, float]]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (bars, lines) = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
    for x, runs in enumerate(results.values()):
        bottom = 0.0
        part = shares(sum((r[0] for r in runs), Counter()))
        for key, colour in COLOURS.items():
            bars.bar(x, part[key], bottom=bottom, color=colour, label=key if x == 0 else None)
            bottom += part[key]
        bars.plot(
            [x - 0.4, x + 0.4],
            [list(PAPER.values())[x]] * 2,
            "k--",
            lw=1,
            label="tokens, in the paper" if x == 0 else None,
        )
    bars.set_xticks(range(len(results)), list(results))
    bars.set_ylabel("% of the pool")
    bars.legend(loc="upper left", fontsize=8)
    for name, runs in results.items():
        lines.plot(100 * np.array(runs[0][1]), label=name, lw=1)
    lines.set_xlabel("step")
    lines.set_ylabel("tokens, % of the pool")
    lines.set_ylim(0, 100)
    lines.legend(fontsize=8)
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent)
    args = parser.parse_args()
    results = run(args.steps, args.seeds, args.requests)
    (args.out / "table.md").write_text(table(results))
    draw(results, args.out / "memory.png")
    print(table(results))


if __name__ == "__main__":
    main()
