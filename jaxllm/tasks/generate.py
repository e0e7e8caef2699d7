"""`task=generate`: continue prompts with a trained model, showing the text as it is made.

With `cache=false` every token is computed from the whole sequence again; the same text is then made with the cache,
and both are reported side by side: what a cache is for, in tokens and seconds.
"""

import dataclasses
import json
from typing import Any, NamedTuple

from jaxllm.config import Config
from jaxllm.data.chat import ChatTemplate
from jaxllm.data.vocabulary import Tokenizer
from jaxllm.errors import UserError
from jaxllm.inference.generate import Generator, start_ids
from jaxllm.inference.sampling import SamplingParams
from jaxllm.inference.settings import GenerateSettings
from jaxllm.inference.transcript import Generation, Stats
from jaxllm.tasks import TaskIO, batch
from jaxllm.tasks.source import open_source

ROWS = 8  # prompts of a file that are generated together
OUTPUT = "generations.jsonl"


def run(cfg: Config, io: TaskIO) -> dict[str, Any]:
    """The text and what it took: `text, tokens, ttft_s, tokens_per_s, tokens_processed` and a few more.

    With `prompts=` text and tokens are lists with one entry a line, also written to generations.jsonl in the run folder
    if there is one. Times hold no compilation (`compile_s`) and no loading.
    """
    settings: GenerateSettings = cfg.section("generate")
    sampling = _check(settings, cfg.source)
    asked = _asked(settings, cfg)
    overrides = {key: value for key, value in cfg.explicit.items() if key.startswith("model.")}
    source = open_source(cfg.path(cfg.source), overrides=overrides, allow_targets=cfg.allow_targets, warn=io.log)
    generator = Generator(source.model, source.tokenizer)
    chat = _chat(settings, source.tokenizer)
    prompts = [_ids(row, generator, settings, chat) for row in asked]
    io.log(f"checkpoint {source.folder} (step {source.step})")
    shared = {"step": source.step, "checkpoint": str(source.folder)}
    if settings.prompts is not None and settings.out is not None:
        return batch.run(source, prompts, settings, cfg.section("server"), cfg.path(settings.out), io) | shared
    weights = generator.prepare(source.params, rows=min(len(prompts), ROWS))
    if settings.prompts is None:
        return _one(generator, weights, prompts[0], settings, sampling, io) | shared
    return _many(generator, weights, prompts, settings, sampling, io) | shared


# --- what is asked for --------------------------------------------------------------------------------------------


def _check(settings: GenerateSettings, source: str | None) -> SamplingParams:
    """Everything that can be refused before a checkpoint is read."""
    if source is None:
        raise UserError("source: missing; give source=<run folder, checkpoint, Hugging Face folder or GGUF file>")
    given = [key for key in ("prompt", "prompt_ids", "prompts") if getattr(settings, key) is not None]
    if len(given) > 1:
        raise UserError(f"{' and '.join(given)}: give only one of them")
    if settings.system is not None and not settings.chat:
        raise UserError("system: is part of a chat; add chat=true")
    if settings.chat and not settings.prompt and settings.prompts is None:
        raise UserError("chat: needs prompt=TEXT, what the user says, or prompts=FILE")
    if settings.out is not None and (settings.prompts is None or not settings.cache):
        raise UserError("out: is where the answers to prompts=FILE go; add prompts=, and leave cache=true")
    if settings.max_new_tokens < 1:
        raise UserError(f"max_new_tokens={settings.max_new_tokens}: must be at least 1")
    return SamplingParams(settings.temperature, settings.top_k, settings.top_p, settings.min_p, settings.seed).check()


class Asked(NamedTuple):
    """One prompt as it was written: text or ids, and where it stands ("" on the command line)."""

    text: str | None
    ids: list[int] | None
    where: str = ""


def _asked(settings: GenerateSettings, cfg: Config) -> list[Asked]:
    """The prompts, before a tokenizer is at hand."""
    if settings.prompts is None:
        return [Asked(settings.prompt, settings.prompt_ids)]
    path = cfg.path(settings.prompts)
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        raise UserError(f"prompts={path}: no such file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"prompts={path}: cannot be read: {error}") from error
    rows = [_line(line, f"prompts={path}, line {number}: ") for number, line in enumerate(lines, 1) if line.strip()]
    if not rows:
        raise UserError(f"prompts={path}: holds no prompt; write one JSON object a line")
    return rows


def _line(line: str, where: str) -> Asked:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        row = None
    if isinstance(row, dict) and len(row) == 1:
        text, ids = row.get("prompt"), row.get("prompt_ids")
        if isinstance(text, str) or (isinstance(ids, list) and all(type(i) is int for i in ids)):
            return Asked(text, ids, where)
    raise UserError(f'{where}expected {{"prompt": "text"}} or {{"prompt_ids": [1, 2]}}')


def _chat(settings: GenerateSettings, tokenizer: Tokenizer | None) -> ChatTemplate | None:
    if not settings.chat:
        return None
    if tokenizer is None:
        raise UserError("chat: this source has no tokenizer, so text cannot be read")
    return ChatTemplate(tokenizer)


def _ids(asked: Asked, generator: Generator, settings: GenerateSettings, chat: ChatTemplate | None) -> list[int]:
    """The ids of a prompt, checked against vocabulary and length."""
    try:
        if asked.ids:
            ids = list(asked.ids)
        elif generator.tokenizer is None:
            raise UserError("prompt: this source has no tokenizer; give prompt_ids=[...]")
        elif chat is not None:
            system = [] if settings.system is None else [{"role": "system", "content": settings.system}]
            ids = chat.encode([*system, {"role": "user", "content": asked.text or ""}])
        else:
            ids = start_ids(generator.tokenizer, asked.text or "")
        generator.check([ids], settings.max_new_tokens)
    except UserError as error:
        raise UserError(f"{asked.where}{error}") from error
    return ids


# --- generating ---------------------------------------------------------------------------------------------------


def _one(
    generator: Generator, weights: Any, ids: list[int], settings: GenerateSettings, sampling: SamplingParams, io: TaskIO
) -> dict[str, Any]:
    """One prompt, its text shown as it is made."""

    def show(_: int, text: str) -> None:
        io.err.write(printable(text))
        io.err.flush()

    if settings.prompt and not settings.chat:
        show(0, settings.prompt)
    common: dict[str, Any] = {"max_new_tokens": settings.max_new_tokens, "sampling": sampling}
    rows, stats = generator.generate(weights, [ids], cache=settings.cache, on_text=show, **common)
    io.err.write("\n")
    row = rows[0]
    result = {"text": row.text, "tokens": row.tokens, "finish": row.finish, "prompt_tokens": len(ids)} | _report(stats)
    if settings.cache:
        return result
    again, cached = generator.generate(weights, [ids], cache=True, **common)
    result["comparison"] = _compare(stats, cached, again[0].tokens == row.tokens, io)
    return result


def _many(
    generator: Generator,
    weights: Any,
    prompts: list[list[int]],
    settings: GenerateSettings,
    sampling: SamplingParams,
    io: TaskIO,
) -> dict[str, Any]:
    """A file of prompts, in batches; each batch is written as soon as it is done."""
    output = io.run_dir / OUTPUT if io.run_dir is not None else None
    done: list[Generation] = []
    totals: list[tuple[Stats, Stats]] = []
    same = True
    for start in range(0, len(prompts), ROWS):
        rows_of = prompts[start : start + ROWS]
        each = [sampling._replace(seed=settings.seed + start + i) for i in range(len(rows_of))]
        common: dict[str, Any] = {"max_new_tokens": settings.max_new_tokens, "sampling": each}
        rows, stats = generator.generate(weights, rows_of, cache=settings.cache, **common)
        again, cached = (rows, stats) if settings.cache else generator.generate(weights, rows_of, cache=True, **common)
        same &= [row.tokens for row in again] == [row.tokens for row in rows]
        totals.append((stats, cached))
        for i, row in enumerate(rows, start):
            io.log(f"[{i}] {printable(row.text)}")
        if output is not None:
            with output.open("a" if start else "w", encoding="utf-8") as file:
                file.writelines(json.dumps(dataclasses.asdict(row)) + "\n" for row in rows)
        done += rows
    stats, cached = (_sum([pair[way] for pair in totals]) for way in (0, 1))
    result = {
        "text": [row.text for row in done],
        "tokens": [row.tokens for row in done],
        "finish": [row.finish for row in done],
        "prompt_tokens": sum(map(len, prompts)),
        "generations": None if output is None else str(output),
    } | _report(stats)
    if not settings.cache:
        result["comparison"] = _compare(stats, cached, same, io)
    return result


def _sum(parts: list[Stats]) -> Stats:
    """Batches one after another: times and counts add up; the first token is that of the first batch."""
    return Stats(
        seconds=sum(part.seconds for part in parts),
        ttft_s=parts[0].ttft_s,
        new_tokens=sum(part.new_tokens for part in parts),
        tokens_processed=sum(part.tokens_processed for part in parts),
        compile_s=sum(part.compile_s for part in parts),
    )


# --- reporting ----------------------------------------------------------------------------------------------------


def _report(stats: Stats) -> dict[str, Any]:
    return {
        "new_tokens": stats.new_tokens,
        "ttft_s": round(stats.ttft_s, 6),
        "generate_s": round(stats.seconds, 6),
        "tokens_per_s": round(stats.tokens_per_s, 3),
        "tokens_processed": stats.tokens_processed,
        "compile_s": round(stats.compile_s, 3),
    }


def _compare(uncached: Stats, cached: Stats, same: bool, io: TaskIO) -> dict[str, Any]:
    """Both ways as JSON, and as a small table on stderr."""
    io.log(f"{'':12}{'tokens processed':>18}{'seconds':>10}{'tokens/s':>10}")
    for name, stats in (("cache=true", cached), ("cache=false", uncached)):
        io.log(f"{name:12}{stats.tokens_processed:>18,}{stats.seconds:>10.3f}{stats.tokens_per_s:>10.1f}")
    more, longer = uncached.tokens_processed / cached.tokens_processed, uncached.seconds / max(cached.seconds, 1e-9)
    tail = "the tokens are the same" if same else "the tokens differ: two ways of rounding, one near-tie"
    io.log(f"without a cache {more:.1f} times as many tokens go through the model, in {longer:.1f} times the time;")
    io.log(tail)
    return {"cached": _report(cached), "uncached": _report(uncached), "same_tokens": same}


def printable(text: str) -> str:
    """Text for a terminal: a model can produce any character, escape sequences included."""
    return "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in text.replace("\r\n", "\n"))
