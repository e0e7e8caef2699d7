"""`task=bench_serve`: load on a server, or on the engine of `source=` in this process; TTFT, TPOT, ITL, throughput, goodput.

The definitions are those of `jaxllm/inference/bench.py`. With a run folder: `bench.json` (every request), `bench.png`, and
both on the dashboard's panel `infer/`.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from pathlib import Path
from typing import Any

from jaxllm.config import Config
from jaxllm.errors import UserError
from jaxllm.inference.bench import Direct, Http, Record, Target, drive, ideal_ratio, summary, trace
from jaxllm.inference.service import Service
from jaxllm.inference.settings import BenchSettings, ServeSettings
from jaxllm.tasks import TaskIO
from jaxllm.tasks.serve import open_engine

REMOTE_IDS = 256  # ids that any vocabulary has


def run(cfg: Config, io: TaskIO) -> dict[str, Any]:
    """JSON fields: `requests, failed, seconds, throughput, goodput, ttft_p50 .., tpot_p50 .., itl_p50 .., cache_mean, ideal_ratio`."""
    settings: BenchSettings = cfg.section("bench")
    server: ServeSettings = cfg.section("server")
    service: Service | None = None
    target: Target
    if settings.url is not None:
        key = None if settings.api_key_env is None else os.environ.get(settings.api_key_env)
        if settings.api_key_env is not None and not key:
            raise UserError(f"bench.api_key_env: the environment has no {settings.api_key_env}")
        if settings.model is None:
            raise UserError("bench.model: missing; give the model's name at bench.url")
        target, vocab = Http(settings.url, settings.model, key), REMOTE_IDS
    else:
        engine, _ = open_engine(cfg, io, server)
        service = Service(engine)
        service.start()
        target, vocab = Direct(service), engine.vocab_size
    jobs = trace(settings, cfg.seed, vocab)
    concurrency = None if settings.rate is not None else settings.concurrency

    def sample() -> dict[str, float]:
        assert service is not None
        scheduler = service.engine.scheduler
        return {
            "cache": service.engine.places.usage,
            "running": len(scheduler.running),
            "waiting": len(scheduler.waiting),
        }

    async def both() -> tuple[list[Record], list[dict[str, float]]]:
        first = [job for job in jobs[: settings.warm_up]]
        await drive(target, first, concurrency=max(1, settings.warm_up))
        rest = jobs[settings.warm_up :]
        shifted = [type(job)(job.prompt, job.output, job.due - rest[0].due) for job in rest]
        return await drive(target, shifted, concurrency=concurrency, sample=None if service is None else sample)

    io.log(f"{settings.requests} requests, {'open loop' if concurrency is None else f'{concurrency} clients'}")
    try:
        records, samples = asyncio.run(both())
    finally:
        if service is not None:
            service.close()
    result = summary(records, ttft_limit=settings.ttft_limit_s, tpot_limit=settings.tpot_limit_s)
    if errors := [r.error for r in records if r.error]:
        io.log(f"{len(errors)} requests failed; the first: {errors[0]}", "warning")
    outputs = [job.output for job in jobs[settings.warm_up :]]
    result["ideal_ratio"] = ideal_ratio(outputs, server.rows)
    if samples:
        result["cache_mean"] = sum(s["cache"] for s in samples) / len(samples)
        result["cache_max"] = max(s["cache"] for s in samples)
    if io.run_dir is not None:
        _write(io.run_dir, result, records, samples)
        _track(cfg, io, result, records, samples)
    return result


def _track(
    cfg: Config, io: TaskIO, result: dict[str, Any], records: list[Record], samples: list[dict[str, float]]
) -> None:
    """The panel `infer/`: load over time, a table of requests, the picture; the figures of the JSON line as the summary."""
    assert io.run_dir is not None
    tracker = cfg.build("track").open(io.run_dir, config=cfg.to_dict(), log=io.log)
    try:
        for i, values in enumerate(samples):
            tracker.log(i, {f"infer/{name}": value for name, value in values.items()}, axis="infer/sample")
        columns = ["tokens", "ttft_s", "tpot_s", "error"]
        rows = [
            [r.tokens, "n/a" if r.error else r.ttft, "n/a" if r.error or r.tpot is None else r.tpot, r.error or ""]
            for r in records
        ]
        tracker.table(0, "infer/requests", columns, rows)
        tracker.image(0, "infer/bench", io.run_dir / "bench.png")
        tracker.summary({f"infer/{name}": value for name, value in result.items() if isinstance(value, int | float)})
    finally:
        tracker.close()


def _write(folder: Path, result: dict[str, Any], records: list[Record], samples: list[dict[str, float]]) -> None:
    start = min(r.due for r in records)
    rows = [
        {
            "due": r.due - start,
            "sent": r.sent - start,
            "times": [t - start for t in r.times],
            "tokens": r.tokens,
            "error": r.error,
        }
        for r in records
    ]
    report = {"when": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), **result, "rows": rows, "samples": samples}
    (folder / "bench.json").write_text(json.dumps(report, indent=1), encoding="utf-8")
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    good = [r for r in records if r.error is None]
    for values, name in (([r.ttft for r in good], "TTFT"), ([r.tpot for r in good if r.tpot is not None], "TPOT")):
        left.plot(sorted(values), [100 * (i + 1) / len(values) for i in range(len(values))], label=name)
    left.set_xscale("log")
    left.set_xlabel("seconds")
    left.set_ylabel("% of requests")
    left.legend()
    for name in ("running", "waiting"):
        right.plot([s["t"] for s in samples], [s[name] for s in samples], label=f"requests {name}")
    share = right.twinx()
    share.plot([s["t"] for s in samples], [100 * s["cache"] for s in samples], "k:", label="cache held, %")
    share.set_ylim(0, 100)
    right.set_xlabel("seconds")
    right.legend(loc="upper left")
    share.legend(loc="upper right")
    figure.savefig(folder / "bench.png", dpi=110)
    plt.close(figure)
