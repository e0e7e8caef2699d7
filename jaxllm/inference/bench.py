"""Load on a server and what it took: one trace of requests, open or closed loop, and the definitions of the numbers.

    TTFT         first token - arrival; in an open loop that is when the request was due, so a client that falls behind hides nothing
    TPOT         (last token - first token) / (tokens - 1); undefined for one token
    ITL          every gap between two chunks of tokens of a request
    throughput   new tokens of all requests / (last token of the run - first arrival)
    goodput      requests a second that kept the limits of TTFT and of TPOT
    late         sent - due, the client's own queueing, reported apart

Times are of one process's monotonic clock. Warm-up requests are left out.
"""

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Protocol
from urllib.parse import urlsplit

import numpy as np

from jaxllm.errors import UserError
from jaxllm.inference.sampling import SamplingParams
from jaxllm.inference.service import Service
from jaxllm.inference.settings import BenchSettings

PERCENTILES = (50, 90, 99)


@dataclass(frozen=True)
class Job:
    """One request of a trace. due: seconds after the start (0 in a closed loop)."""

    prompt: list[int]
    output: int
    due: float = 0.0


@dataclass
class Record:
    """What became of a job: when it was due, sent and answered, by the clock of the run; tokens of each chunk."""

    due: float
    sent: float = 0.0
    times: list[float] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    error: str | None = None

    @property
    def tokens(self) -> int:
        return sum(self.counts)

    @property
    def ttft(self) -> float:
        return self.times[0] - self.due

    @property
    def tpot(self) -> float | None:
        return (self.times[-1] - self.times[0]) / (self.tokens - 1) if self.tokens > 1 else None


class Target(Protocol):
    """Whatever answers: yields how many tokens each chunk brings."""

    def ask(self, job: Job) -> AsyncGenerator[int, None]: ...


# --- the trace ---------------------------------------------------------------------------------------------------------------------


def trace(s: BenchSettings, seed: int, vocab_size: int) -> list[Job]:
    """The jobs of a run, by the seed alone."""
    rng = np.random.default_rng(seed)
    count = s.requests + s.warm_up
    prompts = np.exp(rng.uniform(np.log(s.prompt_min), np.log(s.prompt_max + 1), count)).astype(int)
    middle, spread = np.log(s.output_min * s.output_max) / 2, np.log(s.output_max / s.output_min) / 4
    outputs = np.clip(np.exp(rng.normal(middle, max(spread, 1e-9), count)).astype(int), s.output_min, s.output_max)
    gaps = rng.exponential(1.0 / s.rate, count) if s.rate is not None else np.zeros(count)
    due = np.concatenate([np.zeros(1), np.cumsum(gaps)[:-1]])
    shared = rng.integers(0, vocab_size, s.prefix).tolist()
    bodies = [rng.integers(0, vocab_size, max(1, int(n) - s.prefix)).tolist() for n in prompts]
    return [Job(shared + body, int(o), float(d)) for body, o, d in zip(bodies, outputs, due, strict=True)]


def ideal_ratio(outputs: Sequence[int], rows: int) -> float:
    """How many times as many steps a static batch takes as rows that are filled again at once, for answers of these lengths.

    A bus waits for its last passenger: `sum over batches of the longest`. A shared ride: each row takes the next request when it is free.
    """
    static = sum(max(outputs[i : i + rows]) for i in range(0, len(outputs), rows))
    free = [0] * rows
    for output in outputs:
        first = free.index(min(free))
        free[first] += output
    return static / max(free)


# --- targets -----------------------------------------------------------------------------------------------------------------------


class Direct:
    """An engine's service in this process."""

    def __init__(self, service: Service):
        self.service = service

    async def ask(self, job: Job) -> AsyncGenerator[int, None]:
        params = SamplingParams(temperature=0.0, max_tokens=job.output, ignore_eos=True)
        async with aclosing(self.service.stream(job.prompt, params)) as events:
            async for event in events:
                if event.finish == "error":
                    raise RuntimeError(event.request.error)
                if event.tokens:
                    yield len(event.tokens)


class Http:
    """A server of the OpenAI protocol at `http://host:port`, streaming completions."""

    def __init__(self, url: str, model: str, key: str | None = None, timeout: float = 600.0):
        parts = urlsplit(url)
        if parts.scheme != "http" or parts.hostname is None:
            raise UserError(f"bench.url: {url} is not http://HOST:PORT")
        self._host, self._port, self._path = parts.hostname, parts.port or 80, parts.path.rstrip("/")
        self._model, self._key, self._timeout = model, key, timeout

    async def ask(self, job: Job) -> AsyncGenerator[int, None]:
        body = {
            "model": self._model,
            "prompt": job.prompt,
            "max_tokens": job.output,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }
        async with asyncio.timeout(self._timeout):
            reader, writer = await self._post("/v1/completions", json.dumps(body).encode())
            try:
                async for line in _lines(reader):
                    if not line.startswith(b"data: ") or line == b"data: [DONE]":
                        continue
                    data = json.loads(line[6:])
                    if "error" in data:
                        raise RuntimeError(data["error"]["message"])
                    if data["choices"] and data["choices"][0].get("finish_reason") is None:
                        yield 1
            finally:
                writer.close()

    async def _post(self, path: str, body: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection(self._host, self._port, limit=2**22)
        key = f"Authorization: Bearer {self._key}\r\n" if self._key else ""
        head = f"POST {self._path}{path} HTTP/1.1\r\nHost: {self._host}\r\nContent-Type: application/json\r\n{key}"
        writer.write(f"{head}Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body)
        await writer.drain()
        status = await reader.readline()
        while (await reader.readline()).strip():
            pass
        if b" 200 " not in status:
            rest = (await reader.read(2000)).decode("utf-8", "replace")
            writer.close()
            raise RuntimeError(f"{status.decode('latin-1').strip()}: {' '.join(rest.split())[:300]}")
        return reader, writer


async def _lines(reader: asyncio.StreamReader) -> AsyncGenerator[bytes, None]:
    """Lines of a body, whether it comes in chunks (whose sizes stand in lines of their own, and begin no event) or not."""
    while line := await reader.readline():
        yield line.strip()


# --- a run -------------------------------------------------------------------------------------------------------------------------


async def drive(
    target: Target,
    jobs: Sequence[Job],
    *,
    concurrency: int | None = None,
    sample: Callable[[], dict[str, float]] | None = None,
    every: float = 0.1,
) -> tuple[list[Record], list[dict[str, float]]]:
    """Ask for all jobs: when they are due, or with `concurrency` clients. Records in order; and `sample()` now and then, with its time."""
    start = time.monotonic()
    records = [Record(start + job.due) for job in jobs]
    samples: list[dict[str, float]] = []

    async def one(job: Job, record: Record) -> None:
        record.sent = time.monotonic()
        if concurrency is not None:
            record.due = record.sent
        try:
            async with aclosing(target.ask(job)) as chunks:
                async for count in chunks:
                    record.times.append(time.monotonic())
                    record.counts.append(count)
            if not record.times:
                record.error = "no token came"
        except (RuntimeError, OSError, TimeoutError, ValueError, UserError) as error:
            record.error = f"{type(error).__name__}: {error}"

    async def watch() -> None:
        while sample is not None:
            samples.append({"t": time.monotonic() - start, **sample()})
            await asyncio.sleep(every)

    async def open_loop(job: Job, record: Record) -> None:
        await asyncio.sleep(max(0.0, record.due - time.monotonic()))
        await one(job, record)

    async def client(queue: list[tuple[Job, Record]]) -> None:
        while queue:
            await one(*queue.pop())

    watching = asyncio.create_task(watch())
    try:
        pairs = list(zip(jobs, records, strict=True))
        if concurrency is None:
            await asyncio.gather(*(open_loop(*pair) for pair in pairs))
        else:
            queue = pairs[::-1]
            await asyncio.gather(*(client(queue) for _ in range(concurrency)))
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
    return records, samples


def summary(records: Sequence[Record], *, ttft_limit: float, tpot_limit: float) -> dict[str, Any]:
    """The numbers of a run, in seconds and per second."""
    good = [r for r in records if r.error is None]
    out: dict[str, Any] = {"requests": len(records), "failed": len(records) - len(good)}
    if not good:
        return out
    wall = max(r.times[-1] for r in good) - min(r.due for r in good)
    kept = [r for r in good if r.ttft <= ttft_limit and (r.tpot is None or r.tpot <= tpot_limit)]
    out |= {
        "seconds": wall,
        "new_tokens": sum(r.tokens for r in good),
        "throughput": sum(r.tokens for r in good) / wall,
        "requests_per_s": len(good) / wall,
        "goodput": len(kept) / wall,
    }
    series = {
        "ttft": [r.ttft for r in good],
        "tpot": [t for r in good if (t := r.tpot) is not None],
        "itl": [gap for r in good for gap in np.diff(r.times)],
        "e2e": [r.times[-1] - r.due for r in good],
        "late": [r.sent - r.due for r in good],
    }
    for name, values in series.items():
        for p in PERCENTILES:
            out[f"{name}_p{p}"] = float(np.percentile(np.asarray(values, np.float64), p)) if values else None
    return out
