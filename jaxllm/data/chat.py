"""Chat templates: messages to token ids, as the publisher of a checkpoint wrote it down, without trusting what was written.

A template is a small program of a stranger. It runs in jinja's immutable sandbox, which lets it touch nothing outside its variables;
beyond that, repetition and padding that could fill the memory are refused, and loops and output are bounded. Text of a message is only
ever text: a special token spelled inside it is encoded as ordinary characters, so no message can end its own turn.
"""

import itertools
import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment

from jaxllm.data.subword import JsonTokenizer, parsed
from jaxllm.data.vocabulary import Tokenizer
from jaxllm.errors import UserError

Message = Mapping[str, Any]  # role, content, and whatever else a template may ask for

MAX_TEMPLATE_CHARS = 2**20
MAX_OUTPUT_CHARS = 2**24
MAX_STEPS = 10**5  # of all ranges of one rendering together
ASSISTANT = "assistant"
TAGS = ("generation_opens", "generation_closes")  # variables that `Generation` writes
PADDING = frozenset({"format", "format_map", "ljust", "rjust", "center", "zfill", "expandtabs"})


class ChatTemplate:
    """The template of a tokenizer, or `text`. Raises UserError when there is none, or one that cannot be read."""

    def __init__(self, tokenizer: Tokenizer, text: str | None = None) -> None:
        if not isinstance(tokenizer, JsonTokenizer):
            raise UserError("chat: this model's tokenizer has no chat template; leave chat out")
        self.tokenizer = tokenizer
        self._settings = parsed(tokenizer.companions.get("tokenizer_config.json"))
        text = template_text(tokenizer.companions) if text is None else text
        if text is None:
            raise UserError("chat: this model came without a chat template; leave chat out and give the whole prompt")
        if len(text) > MAX_TEMPLATE_CHARS:
            raise UserError(f"chat template: {len(text)} characters is too long for one")
        try:
            self._template = Sandbox().from_string(text)
        except (jinja2.TemplateError, RecursionError) as error:
            raise UserError(f"chat template: cannot be read: {_one_line(error)}") from None
        self._special = sorted(tokenizer.special_tokens, key=len, reverse=True)
        self._tagged = "endgeneration" in text
        names = {index: token for token, index in tokenizer.special_tokens.items()}
        ids = {"bos_token": tokenizer.bos_id, "eos_token": tokenizer.eos_id}
        named = {key: None if index is None else names.get(index) for key, index in ids.items()}
        named |= {key: _content(self._settings[key]) for key in self._settings if key.endswith("_token")}
        self._named = {key: token for key, token in named.items() if token is not None}

    def render(
        self, messages: Sequence[Message], *, add_generation_prompt: bool = True, tags: tuple[str, str] = ("", "")
    ) -> str:
        """The text of a conversation, ready for the answer. tags: written around what the template marks as the assistant's."""
        variables = {"tools": None, "documents": None, **self._named, TAGS[0]: tags[0], TAGS[1]: tags[1]}
        pieces, size = [], 0
        try:
            for piece in self._template.generate(
                messages=[dict(message) for message in messages],
                add_generation_prompt=add_generation_prompt,
                range=Steps(),
                **variables,
            ):
                size += len(piece)
                if size > MAX_OUTPUT_CHARS:
                    raise UserError(f"chat template: writes more than {MAX_OUTPUT_CHARS} characters")
                pieces.append(piece)
        except UserError:
            raise
        except (
            jinja2.TemplateError,
            ArithmeticError,
            LookupError,
            TypeError,
            ValueError,
            RecursionError,
            MemoryError,
        ) as error:
            raise UserError(f"chat template: {_one_line(error)}") from None
        return "".join(pieces)

    def encode(self, messages: Sequence[Message], *, add_generation_prompt: bool = True) -> list[int]:
        """Ids of a conversation; exactly one bos at its start where the model has one."""
        guarded, marks = self._guard(messages)
        text = self.render(guarded, add_generation_prompt=add_generation_prompt)
        return self._one_bos(self._located(text, marks)[0])

    def conversation(self, messages: Sequence[Message], *, last_only: bool = False) -> tuple[list[int], list[bool]]:
        """Ids of a finished conversation as `encode` gives them, and which of them the assistant says: what is trained.

        Those are the tokens that generation would have to produce: an answer and the token that ends it, none of the template's
        words around it. An answer that the template ends with no token of `stop_ids` gets `eos` where it ends the conversation.
        last_only: train the last answer alone. Raises UserError where an answer cannot be found in what the template writes.
        """
        guarded, marks = self._guard(messages)
        text, spans = self._answers(guarded, last_only)
        ids, places = self._located(text, marks)
        spans = [self._ended(text, begin, end) for begin, end in spans]
        trained = [any(begin <= place < end for begin, end in spans) for place in places]
        whole = self._one_bos(ids)
        trained = [False] * (len(whole) - len(ids)) + trained[max(0, len(ids) - len(whole)) :]
        last = max((i for i, flag in enumerate(trained) if flag), default=None)
        if last is not None and messages[-1].get("role") == ASSISTANT and whole[last] not in self.tokenizer.stop_ids:
            whole, trained = [*whole[: last + 1], self.tokenizer.eos_id], [*trained[: last + 1], True]
        return whole, trained

    def _answers(self, messages: Sequence[Message], last_only: bool) -> tuple[str, list[tuple[int, int]]]:
        """The text of a conversation and where the assistant's turns lie in it: as the template's own tags say, else by what each
        turn adds to the text of the turns before it."""
        if self._tagged:
            opens, closes = _unused(messages, 2)
            tags = (opens, closes)
            parts = re.split(f"[{opens}{closes}]", self.render(messages, add_generation_prompt=False, tags=tags))
            ends = list(itertools.accumulate(map(len, parts)))
            spans = [(ends[i], ends[i + 1]) for i in range(0, len(ends) - 1, 2)]
            return "".join(parts), spans[-1:] if last_only else spans
        text, spans = self.render(messages, add_generation_prompt=False), []
        turns = [i for i, message in enumerate(messages) if message.get("role") == ASSISTANT]
        for i in turns[-1:] if last_only else turns:
            before = self.render(messages[:i])
            after = self.render(messages[: i + 1], add_generation_prompt=False)
            if not (text.startswith(after) and after.startswith(before)):
                raise UserError(
                    f"chat template: message {i + 1} is written otherwise once the conversation goes on, so it cannot be told apart;"
                    " set data.turns=last, or mark answers with {% generation %} in the template"
                )
            spans.append((len(before), len(after)))
        return text, spans

    def _ended(self, text: str, begin: int, end: int) -> tuple[int, int]:
        """A turn's span up to the token that ends it: without blanks behind it, and with it where it stands just behind."""
        core = text[begin:end].rstrip()
        if any(core.endswith(token) for token in self._special):
            return begin, begin + len(core)
        return begin, end + next((len(token) for token in self._special if text.startswith(token, end)), 0)

    def _located(self, text: str, marks: tuple[str, list[str]] | None) -> tuple[list[int], list[int]]:
        """Ids of a rendered text, and the character where each begins. `marks`: see `_guard`."""
        if not marks:
            return self.tokenizer.encode_located(text)
        ids: list[int] = []
        places: list[int] = []
        at = 0
        for i, part in enumerate(re.split(f"{marks[0]}(\\d+){marks[0]}", text)):
            more, where = (
                (list(self.tokenizer.encode(marks[1][int(part)])), None)
                if i % 2
                else self.tokenizer.encode_located(part)
            )
            ids += more
            places += [at] * len(more) if where is None else [at + place for place in where]
            at += len(part) + 2 * (i % 2)  # a mark stands before and behind the number
        return ids, places

    def _one_bos(self, ids: list[int]) -> list[int]:
        bos = self.tokenizer.bos_id
        if bos is None:
            declared = _content(self._settings.get("bos_token"))
            bos = self.tokenizer.special_tokens.get(declared or "")
            return ids[1:] if bos is not None and ids[:2] == [bos, bos] else ids
        while ids[:1] == [bos]:
            ids = ids[1:]
        return [bos, *ids]

    def _guard(self, messages: Sequence[Message]) -> tuple[list[dict[str, Any]], tuple[str, list[str]] | None]:
        """Put a mark in the place of every special token that a message spells, whatever the template does with the rest."""
        texts = [m["content"] for m in messages if isinstance(m.get("content"), str)]
        found = [token for token in self._special if any(token in text for text in texts)]
        if not found:
            return [dict(m) for m in messages], None
        mark = _unused(messages, 1)[0]
        pattern = re.compile("|".join(map(re.escape, found)))

        def one(message: Message) -> dict[str, Any]:
            if not isinstance(text := message.get("content"), str):
                return dict(message)
            return {**message, "content": pattern.sub(lambda hit: f"{mark}{found.index(hit.group())}{mark}", text)}

        return [one(m) for m in messages], (mark, found)


def _unused(messages: Sequence[Message], count: int) -> tuple[str, ...]:
    """Characters of the private use area that no message holds."""
    held = set(json.dumps([dict(message) for message in messages], ensure_ascii=False, default=str))
    return tuple(itertools.islice((c for c in map(chr, range(0xE000, 0xF8FF)) if c not in held), count))


def template_text(companions: Mapping[str, str]) -> str | None:
    """The template among a tokenizer's files: chat_template.jinja, else the `chat_template` of tokenizer_config.json."""
    if "chat_template.jinja" in companions:
        return companions["chat_template.jinja"]
    value = parsed(companions.get("tokenizer_config.json")).get("chat_template")
    if isinstance(value, list):  # several, by name
        named = {entry.get("name"): entry.get("template") for entry in value if isinstance(entry, dict)}
        value = named.get("default")
    return value if isinstance(value, str) else None


def _content(value: Any) -> str | None:
    value = value.get("content") if isinstance(value, dict) else value
    return value if isinstance(value, str) else None


# ---- the sandbox --------------------------------------------------------------------------------------------------------------------


class Sandbox(ImmutableSandboxedEnvironment):
    """What templates are written for (trimmed blocks, `raise_exception`, `strftime_now`, `tojson` that keeps characters), and no more."""

    intercepted_binops = frozenset({"*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", Generation])
        self.filters = {k: v for k, v in self.filters.items() if k not in ("center", "format", "wordwrap", "indent")}
        self.filters["tojson"] = _tojson
        self.globals = {
            "raise_exception": _refuse,
            "strftime_now": _now,
            "namespace": self.globals["namespace"],
            "dict": dict,
        }

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if not all(isinstance(x, int | float) and abs(x) <= 2**31 for x in (left, right)) or operator == "**":
            raise jinja2.exceptions.SecurityError(f"the operator {operator} is for small numbers only")
        return super().call_binop(context, operator, left, right)

    def wrap_str_format(self, value: Any) -> None:
        """`str.format` is an attribute like any other here, and not a safe one: it can pad to any width."""

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        return super().is_safe_attribute(obj, attr, value) and not (isinstance(obj, str) and attr in PADDING)


class Steps:
    """`range`, with one budget for all of a rendering."""

    def __init__(self) -> None:
        self.left = MAX_STEPS

    def __call__(self, *bounds: int) -> range:
        steps = range(*bounds)
        self.left -= len(steps)
        if self.left < 0:
            raise jinja2.exceptions.SecurityError(f"loops over more than {MAX_STEPS} steps")
        return steps


class Generation(Extension):
    """`{% generation %}`, which marks what an assistant wrote for training: what it encloses, between two variables that are
    empty unless the caller of `render` asks for tags."""

    tags = {"generation"}

    def parse(self, parser: Any) -> Any:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        opens, closes = (nodes.Output([nodes.Name(name, "load")], lineno=line) for name in TAGS)
        return nodes.Scope([opens, *body, closes], lineno=line)


def _tojson(value: Any, indent: int | None = None, ensure_ascii: bool = False, **kwargs: Any) -> str:
    allowed = {key: kwargs[key] for key in ("separators", "sort_keys") if key in kwargs}
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=None if indent is None else min(int(indent), 8), **allowed
    )


def _refuse(message: str) -> str:
    raise jinja2.exceptions.TemplateError(message)


def _now(form: str) -> str:
    return datetime.now().strftime(form[:100])


def _one_line(error: BaseException) -> str:
    return (" ".join(str(error).split()) or type(error).__name__)[:200]
