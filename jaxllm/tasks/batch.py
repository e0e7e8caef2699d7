"""`task=generate prompts=FILE out=FILE`: a file of prompts through the engine, each answer written as soon as it is there.

The answers stand in the order in which they were finished; `index` is the line of the prompt. Started again with the same two files, it
goes on with the prompts that have no answer yet: nothing that was written is computed again. Row i draws with `seed + i`, so an answer
does not depend on where the run was interrupted, nor on which rows ran beside it.
"""

from __future__ import annotations

import dataclasses
import json
import os
import time
from collections import deque
from pathlib import Path
from typing import Any, TextIO

from jaxllm.errors import UserError
from jaxllm.inference.answers import answer
from jaxllm.inference.engine import Engine
from jaxllm.inference.sampling import SamplingParams
from jaxllm.inference.settings import EngineSettings, GenerateSettings
from jaxllm.tasks import TaskIO
from jaxllm.tasks.source import Source


def run(
    source: Source, prompts: list[list[int]], settings: GenerateSettings, server: EngineSettings, path: Path, io: TaskIO
) -> dict[str, Any]:
    """JSON fields: `prompts, answered` (now), `found` (already there), `new_tokens, generate_s, tokens_per_s, cached_tokens, out`."""
    done = answered(path, prompts)
    left = [i for i in range(len(prompts)) if i not in done]
    if done:
        io.log(f"{path}: {len(done)} of {len(prompts)} prompts are answered; going on with the rest")
    result = {"prompts": len(prompts), "found": len(done), "out": str(path)}
    if not left:
        return result | {"answered": 0, "new_tokens": 0, "generate_s": 0.0, "tokens_per_s": 0.0, "cached_tokens": 0}
    engine = Engine(source.model, source.params, source.tokenizer, _fitted(server, prompts, settings, source))
    engine.runner.warm_up(scores=False)
    start = time.monotonic()
    with path.open("a", encoding="utf-8") as file:
        counts = _answer(engine, prompts, deque(left), settings, file, io)
    seconds = time.monotonic() - start
    return (
        result
        | counts
        | {
            "generate_s": round(seconds, 6),
            "tokens_per_s": round(counts["new_tokens"] / max(seconds, 1e-9), 3),
            "compile_s": round(sum(row["seconds"] for row in engine.runner.report), 3),
            "interrupted": counts["answered"] < len(left),
        }
    )


def _fitted(
    server: EngineSettings, prompts: list[list[int]], settings: GenerateSettings, source: Source
) -> EngineSettings:
    """No longer rows and no more of them than these prompts need."""
    longest = max(map(len, prompts)) + settings.max_new_tokens
    length = -(-longest // server.page_size) * server.page_size
    limit = source.model.max_seq_len
    names = [field.name for field in dataclasses.fields(EngineSettings)]
    fields = {name: getattr(server, name) for name in names}
    fields["max_len"] = server.max_len or (length if limit is None else min(length, limit))
    fields["rows"] = min(server.rows, len(prompts))
    return EngineSettings(**fields)


def _answer(
    engine: Engine, prompts: list[list[int]], left: deque[int], settings: GenerateSettings, file: TextIO, io: TaskIO
) -> dict[str, int]:
    base = SamplingParams(
        settings.temperature, settings.top_k, settings.top_p, settings.min_p, max_tokens=settings.max_new_tokens
    )
    total, counts = len(left), {"answered": 0, "new_tokens": 0, "cached_tokens": 0}
    texts: dict[int, list[str]] = {}
    running = 0
    while left or running:
        if io.stop.is_set():
            break
        while left and running < 2 * engine.settings.rows:
            i = left.popleft()
            engine.submit(prompts[i], base._replace(seed=settings.seed + i), client=i)
            running += 1
        for event in engine.step():
            i = event.request.client
            texts.setdefault(i, []).append(event.text)
            counts["new_tokens"] += len(event.tokens)
            if event.finish is None:
                continue
            if event.finish == "error":
                raise RuntimeError(f"prompt {i}: {event.request.error}")
            row = answer(event.request, "".join(texts.pop(i)))
            line = {
                "index": i,
                "prompt_ids": row.prompt_ids,
                "tokens": row.tokens,
                "text": row.text,
                "finish": row.finish,
            }
            file.write(json.dumps(line) + "\n")
            file.flush()
            counts["answered"] += 1
            counts["cached_tokens"] += row.cached
            running -= 1
        io.progress(f"{counts['answered']} of {total} prompts, {counts['new_tokens']:,} tokens")
    os.fsync(file.fileno())
    return counts


def answered(path: Path, prompts: list[list[int]]) -> set[int]:
    """Indices of the prompts that the file answers. A last line that was cut off is taken away; all else that does not fit is refused."""
    if not path.exists():
        return set()
    raw = path.read_bytes()
    whole = raw[: raw.rfind(b"\n") + 1]
    if whole != raw:
        with path.open("r+b") as file:
            file.truncate(len(whole))
    done: set[int] = set()
    for number, line in enumerate(whole.decode("utf-8", "replace").splitlines(), 1):
        try:
            row = json.loads(line)
            index, ids = int(row["index"]), row["prompt_ids"]
        except (ValueError, TypeError, KeyError, RecursionError):
            raise UserError(f"out={path}, line {number}: is no answer of this task; give another file") from None
        if not 0 <= index < len(prompts) or prompts[index] != ids:
            raise UserError(f"out={path}, line {number}: answers another prompt {index}; give another file")
        done.add(index)
    return done
