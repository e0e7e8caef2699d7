"""Probes with one right answer: questions with choices from jsonl, and a needle hidden in a haystack of text."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from jaxllm.data.files import Reading, find_files, keys, read_records, unicode
from jaxllm.data.store import TokenStore, starts_of
from jaxllm.data.vocabulary import Tokenizer
from jaxllm.errors import UserError

PLACES = ("Amsterdam", "Bergen", "Cordoba", "Dakar", "Edinburgh", "Fukuoka", "Geneva", "Havana")


@dataclass(frozen=True)
class Question:
    """A prompt, what may follow it, and which of that is right."""

    prompt: str
    choices: tuple[str, ...]
    answer: int


def read_questions(path: str, base: Path) -> list[Question]:
    """Lines `{"prompt": text, "choices": [text, ...], "answer": index}`. A choice is written right behind the prompt, so it begins with a
    space where one belongs there. Anything else names file and line."""
    found = []
    for file in find_files(path, base):
        for where, record in read_records(file, Reading()):
            prompt, choices, answer = (record.get(key) for key in ("prompt", "choices", "answer"))
            if not isinstance(prompt, str) or not isinstance(choices, list):
                raise UserError(f"{where}: needs prompt and choices (keys of this line: {keys(record)})")
            if len(choices) < 2 or not all(isinstance(choice, str) and choice for choice in choices):
                raise UserError(f"{where}: choices must be two texts or more, none of them empty")
            if not isinstance(answer, int) or isinstance(answer, bool) or not 0 <= answer < len(choices):
                raise UserError(f"{where}: answer={answer!r} must be the index of a choice, 0 to {len(choices) - 1}")
            for text in (prompt, *choices):
                unicode(text, where)
            found.append(Question(prompt, tuple(choices), answer))
    if not found:
        raise UserError(f"{path}: holds no question")
    return found


def haystack(store: TokenStore, tokenizer: Tokenizer, least: int) -> np.ndarray:
    """At least so many tokens of a store's documents (all, where it has fewer), without what marks their ends."""
    parts: list[np.ndarray] = []
    size = 0
    for index in range(len(store)):
        ids = store.document(index)
        ids = ids[(ids != tokenizer.eos_id) & (ids != (-1 if tokenizer.bos_id is None else tokenizer.bos_id))]
        parts.append(ids)
        size += len(ids)
        if size >= least:
            break
    return np.concatenate([np.zeros(0, np.uint32), *parts])


def needles(tokenizer: Tokenizer, hay: np.ndarray, length: int, depth: float, count: int, seed: int) -> TokenStore:
    """`count` documents of exactly `length` tokens: text with a sentence in it that gives a place a number, and at the end the same
    sentence again, whose number is all that is judged. depth: where in the text, from 0 to 1. hay: tokens of ordinary text."""
    rng = np.random.default_rng([seed, length, round(1000 * depth)])
    documents: list[Sequence[int]] = []
    judged = []
    for index in range(count):
        place, number = PLACES[index % len(PLACES)], int(rng.integers(1000, 10000))
        needle = tokenizer.encode(f"\nThe number of {place} is {number}.\n")
        question, answer = tokenizer.encode(f"\nThe number of {place} is"), tokenizer.encode(f" {number}")
        begin = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
        room = length - len(begin) - len(needle) - len(question) - len(answer)
        if room < 0 or len(hay) < room + 1:
            raise UserError(
                f"eval.needle={length}: a needle and its question take {length - room} tokens, and the text has {len(hay)};"
                " choose a length between the two"
            )
        start = int(rng.integers(len(hay) - room))
        text, at = [int(i) for i in hay[start : start + room]], round(depth * room)
        documents.append([*begin, *text[:at], *needle, *text[at:], *question, *answer])
        judged.append(np.arange(length) >= length - len(answer))
    lengths = np.full(count, length, np.int64)
    tokens, trained = np.concatenate(documents).astype(np.uint32), np.concatenate(judged).astype(np.uint8)
    return TokenStore(tokens, starts_of(lengths), lengths, trained)
