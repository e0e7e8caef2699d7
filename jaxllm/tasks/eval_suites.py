"""The suites of `task=eval` beside the loss of its text: domains, recall, needle, multiple choice. Each gives rows of plain numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxllm.data.corpus import Corpus, Source
from jaxllm.data.probes import Question, needles, read_questions
from jaxllm.data.store import TokenStore
from jaxllm.data.synthetic import Synthetic
from jaxllm.data.text import Text
from jaxllm.data.vocabulary import Tokenizer
from jaxllm.errors import UserError
from jaxllm.training.likelihood import Scorer, pair
from jaxllm.training.settings import EvalSettings

Rows = Callable[
    [TokenStore, int | None], Iterable[Mapping[str, np.ndarray]]
]  # batches of a store, in rows of a length; None = the run's
Evaluate = Callable[[Iterable[Mapping[str, np.ndarray]]], dict[str, Any]]
KEPT = ("loss", "bpb", "accuracy", "tokens")


def domains(
    settings: EvalSettings, prepare: Callable[[Source], Corpus], evaluate: Evaluate, rows: Rows
) -> dict[str, Any]:
    """Loss and bits per byte of each text alone."""
    found = {}
    for name, path in settings.domains.items():
        corpus = prepare(Text(path=path, val_every=0))
        found[name] = {key: value for key, value in evaluate(rows(corpus.train, None)).items() if key in KEPT}
    return found


def recall(
    settings: EvalSettings, prepare: Callable[[Source], Corpus], evaluate: Evaluate, rows: Rows
) -> dict[str, Any]:
    """Share of the answers' tokens that the model finds likeliest, in made-up lists of pairs."""
    found = {}
    for name, fields in settings.recall.items():
        try:
            source = Synthetic(**{"documents": 64, "queries": 1, **fields, "val_every": 0, "answers_only": True})
        except TypeError as error:
            raise UserError(f"eval.recall.{name}: {str(error).partition('.__init__() ')[2] or error}") from None
        result = evaluate(rows(prepare(source).train, None))
        found[name] = {key: result[key] for key in ("loss", "accuracy", "tokens")}
    return found


def needle(
    settings: EvalSettings, tokenizer: Tokenizer, hay: np.ndarray, evaluate: Evaluate, rows: Rows, seed: int
) -> list[dict[str, Any]]:
    """Of each length and depth: loss and share of the number's tokens that the model finds likeliest, given those before."""
    found = []
    for length in settings.needle:
        for depth in np.linspace(0.0, 1.0, settings.needle_depths) if settings.needle_depths > 1 else (0.5,):
            store = needles(tokenizer, hay, length, float(depth), settings.needle_count, seed)
            result = evaluate(rows(store, length))  # a row is a document
            row = {"length": length, "depth": round(float(depth), 3)}
            found.append(row | {key: result[key] for key in ("loss", "accuracy", "tokens")})
    return found


def choices(
    settings: EvalSettings, tokenizer: Tokenizer, scorer: Scorer, params: Mapping[str, Any], base: Path
) -> dict[str, dict[str, Any]]:
    """Multiple choice by likelihood. `acc`: the choice of the highest log-probability is right; `acc_norm`: the highest a byte, so
    that long answers are not at a disadvantage. `stderr` of acc; `chance`: what guessing would give."""
    found = {}
    for name, path in settings.choices.items():
        questions = read_questions(path, base)[: settings.limit]
        scores = answers(questions, tokenizer, scorer, params)
        right, normed = (
            np.mean([best[i] == q.answer for best, q in zip(scores, questions, strict=True)]) for i in (0, 1)
        )
        found[name] = {
            "acc": float(right),
            "acc_norm": float(normed),
            "stderr": float(np.sqrt(right * (1 - right) / max(len(questions) - 1, 1))),
            "chance": float(np.mean([1 / len(q.choices) for q in questions])),
            "questions": len(questions),
        }
    return found


def answers(
    questions: Sequence[Question], tokenizer: Tokenizer, scorer: Scorer, params: Mapping[str, Any]
) -> list[tuple[int, int]]:
    """The choice of each question by log-probability, and by log-probability a byte."""
    pairs = [pair(tokenizer, question.prompt, choice) for question in questions for choice in question.choices]
    scores = iter(scorer(params, pairs))
    found = []
    for question in questions:
        logprobs = np.array([next(scores).logprob for _ in question.choices])
        sizes = np.array([len(choice.encode()) for choice in question.choices])
        found.append((int(np.argmax(logprobs)), int(np.argmax(logprobs / sizes))))
    return found
