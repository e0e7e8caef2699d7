"""Chat templates: messages to token ids, as the publisher of a checkpoint wrote it down, without trusting what was written.

A template is a small program of a stranger. It runs in jinja's immutable sandbox, which lets it touch nothing outside its variables;
beyond that, repetition and padding that could fill the memory are refused, and loops and output are bounded. Text of a message is only
ever text: a special token spelled inside it is encoded as ordinary characters, so no message can end its own turn.
"""

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
PADDING = frozenset({"format", "format_map", "ljust", "rjust", "center", "zfill", "expandtabs"})


class ChatTemplate:
    """The template of a tokenizer. Raises UserError when it has none, or one that cannot be read."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        if not isinstance(tokenizer, JsonTokenizer):
            raise UserError("chat: this model's tokenizer has no chat template; leave chat out")
        self.tokenizer = tokenizer
        self._settings = parsed(tokenizer.companions.get("tokenizer_config.json"))
        text = template_text(tokenizer.companions)
        if text is None:
            raise UserError("chat: this model came without a chat template; leave chat out and give the whole prompt")
        if len(text) > MAX_TEMPLATE_CHARS:
            raise UserError(f"chat template: {len(text)} characters is too long for one")
        try:
            self._template = Sandbox().from_string(text)
        except (jinja2.TemplateError, RecursionError) as error:
            raise UserError(f"chat template: cannot be read: {_one_line(error)}") from None
        self._special = sorted(tokenizer.special_tokens, key=len, reverse=True)

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool = True) -> str:
        """The text of a conversation, ready for the answer."""
        named = {key: _content(self._settings[key]) for key in self._settings if key.endswith("_token")}
        variables = {"tools": None, "documents": None, **{k: v for k, v in named.items() if v is not None}}
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
        if not marks:
            ids = self.tokenizer.encode_marked(text)
        else:
            ids = []
            for i, part in enumerate(re.split(f"{marks[0]}(\\d+){marks[0]}", text)):
                ids += self.tokenizer.encode(marks[1][int(part)]) if i % 2 else self.tokenizer.encode_marked(part)
        return self._one_bos(ids)

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
        mark = next(c for c in map(chr, range(0xE000, 0xF8FF)) if not any(c in text for text in texts))
        pattern = re.compile("|".join(map(re.escape, found)))

        def one(message: Message) -> dict[str, Any]:
            if not isinstance(text := message.get("content"), str):
                return dict(message)
            return {**message, "content": pattern.sub(lambda hit: f"{mark}{found.index(hit.group())}{mark}", text)}

        return [one(m) for m in messages], (mark, found)


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
    """`{% generation %}`, which marks what an assistant wrote for training; here it is only what it encloses."""

    tags = {"generation"}

    def parse(self, parser: Any) -> Any:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


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
