"""`task=read`: a model reads a long stream piece by piece and goes on from it; what that takes, at every doubling of the length.

One row, by the compiled calls that generation uses. The stream is ids drawn from the seed: speed and memory do not depend on what is
read. A mixer with a state of constant size holds the same memory after a million tokens as after a thousand; an attention cache grows.
"""

from __future__ import annotations

import resource
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxllm.cache import cache_bytes
from jaxllm.config import Config
from jaxllm.errors import UserError
from jaxllm.inference.generate import Generator
from jaxllm.inference.programs import Progress
from jaxllm.inference.sampling import Sampling, SamplingParams
from jaxllm.inference.settings import ReadSettings
from jaxllm.params import init_params
from jaxllm.tasks import TaskIO
from jaxllm.tasks.count import vocabulary
from jaxllm.tasks.source import open_source


def run(cfg: Config, io: TaskIO) -> dict[str, Any]:
    """JSON fields: `marks`, one at every power of two of pieces; speed of reading and decoding; bytes of the cache; memory."""
    settings: ReadSettings = cfg.section("read")
    model, params = _model(cfg, io)
    if model.max_seq_len is not None and settings.tokens + settings.decode > model.max_seq_len:
        raise UserError(
            f"read.tokens: {settings.tokens} and read.decode={settings.decode} do not fit model.max_seq_len={model.max_seq_len}"
        )
    reader = Reader(model, params, settings, cfg.seed)
    marks = []
    for mark in reader.read():
        marks.append(mark)
        io.progress(
            f"{mark['tokens']:,} tokens, {mark['tokens_per_s']:,.0f} a second, {mark['rss_bytes'] / 2**20:,.0f} MiB resident"
        )
    read_s = sum(m["seconds"] for m in marks)
    return {
        "tokens": settings.tokens,
        "tokens_per_s": settings.tokens / read_s,
        "marks": marks,
        "decode_ms": reader.decode(),
        "compile_s": reader.generator.programs.compile_s,
        "cache_bytes": cache_bytes(reader.cache),
        "peak_rss_bytes": peak_rss(),
        "flops_per_token": model.cost(1, settings.tokens, (settings.tokens + 1) / 2).flops / settings.tokens,
    }


def _model(cfg: Config, io: TaskIO) -> tuple[Any, Any]:
    if cfg.source is not None:
        source = open_source(cfg.path(cfg.source), overrides={}, allow_targets=cfg.allow_targets, warn=io.log)
        return source.model, source.params
    model = cfg.build("model", **vocabulary(cfg))
    return model, init_params(model, jax.random.key(cfg.seed))


class Reader:
    """The compiled calls of one row and where it stands."""

    def __init__(self, model: Any, params: Any, settings: ReadSettings, seed: int) -> None:
        self.generator = Generator(model, prefill_chunk=settings.chunk)
        self.weights, self.settings = self.generator.prepare(params), settings
        self.capacity = settings.tokens + settings.decode
        self.ids = np.random.Generator(np.random.Philox(seed))
        self.cache, self.logits = self.generator.programs.init(self.weights, 1, self.capacity)()
        self.prefill = self.generator.programs.prefill(self.weights, 1, self.capacity, settings.chunk)

    def read(self) -> Iterator[dict[str, Any]]:
        """Yield a mark at chunk, 2 chunk, 4 chunk .. tokens and at the end: what the tokens since the last one took."""
        total, chunk, last = self.settings.tokens, self.settings.chunk, 0
        start, at = time.perf_counter(), chunk
        for begin in range(0, total, chunk):
            size = min(chunk, total - begin)
            tokens = self.ids.integers(0, self.generator.vocab_size, (1, chunk), np.int32)
            where = np.array([begin], np.int32), np.array([size], np.int32)
            self.cache, self.logits = self.prefill(self.weights, self.cache, self.logits, tokens, *where)
            jax.block_until_ready(self.logits)
            done = begin + size
            if done >= at or done == total:
                taken = time.perf_counter() - start
                yield {
                    "tokens": done,
                    "seconds": taken,
                    "tokens_per_s": (done - last) / taken,
                    "rss_bytes": rss(),
                    "peak_rss_bytes": peak_rss(),
                }
                last, at, start = done, 2 * at, time.perf_counter()

    def decode(self) -> float:
        """Median ms of a token decoded greedily after the stream."""
        programs, settings = self.generator.programs, self.settings
        stop = np.full(1, -1, np.int32)
        draw, step = programs.draw(self.weights, 1, len(stop)), programs.decode(self.weights, 1, self.capacity)
        greedy = Sampling.rows([SamplingParams(temperature=0.0).check()])
        row = np.array([settings.tokens], np.int32)
        progress, times = Progress(row, row, np.array([settings.decode], np.int32)), []
        for n in range(settings.decode):
            start = time.perf_counter()
            progress, ids, _ = draw(self.logits, progress, greedy, stop)
            if n < settings.decode - 1:
                self.cache, self.logits, progress = step(self.weights, self.cache, progress)
            jax.block_until_ready((ids, self.logits))
            times.append(1e3 * (time.perf_counter() - start))
        return statistics.median(times)


def rss() -> int:
    """Bytes of this process in memory now; where the system does not say, the most there ever were."""
    status = Path("/proc/self/statm")
    return int(status.read_text().split()[1]) * resource.getpagesize() if status.exists() else peak_rss()


def peak_rss() -> int:
    """The most bytes of this process that were ever in memory."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
