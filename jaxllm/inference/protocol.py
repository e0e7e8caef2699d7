"""The OpenAI protocol in plain data: request bodies in, checked; response bodies out. No HTTP, no engine.

Every mistake of a client is a `ProtocolError` with the status, the parameter and one line. Fields that nobody knows are ignored; a known
field of the wrong type never is.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxllm.data.vocabulary import Tokenizer
from jaxllm.errors import UserError
from jaxllm.inference.answers import Event
from jaxllm.inference.requests import Request
from jaxllm.inference.sampling import SamplingParams

MAX_DEPTH = 32
MAX_PROMPTS = 64
NEVER = -9999.0
DEFAULT_TOKENS = {"completion": 16, "chat": None}  # OpenAI's; None = what the context leaves


class ProtocolError(Exception):
    """A client's mistake, as the body and the status it is answered with."""

    def __init__(self, message: str, status: int = 400, param: str | None = None, code: str | None = None):
        super().__init__(message)
        self.message, self.status, self.param, self.code = message, status, param, code

    def body(self) -> dict[str, Any]:
        kind = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}.get(self.status)
        kind = kind or ("server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


@dataclass(frozen=True)
class Asked:
    """What a body asks for. prompts: texts or ids (completions); messages: of a chat. kind: "completion" or "chat"."""

    kind: str
    model: str | None
    prompts: list[str | list[int]]
    messages: list[dict[str, Any]] | None
    fields: dict[str, Any]  # of SamplingParams, `max_tokens` perhaps missing
    stream: bool
    usage: bool
    echo: bool
    salt: str

    def params(self, room: int) -> SamplingParams:
        """`room`: tokens that the context leaves, which is what a chat without a limit of its own gets."""
        fields = dict(self.fields)
        if fields.get("max_tokens") is None:
            fields["max_tokens"] = max(1, min(DEFAULT_TOKENS[self.kind] or room, room))
        try:
            return SamplingParams(**fields).check()
        except UserError as error:
            raise ProtocolError(str(error), param=str(error).split("=")[0]) from None


# --- reading -----------------------------------------------------------------------------------------------------------------------


def parse_json(raw: bytes) -> dict[str, Any]:
    """A JSON object from anybody: bounded depth, no NaN or infinity, no lone surrogates."""

    def refuse(word: str) -> Any:
        raise ValueError(f"{word} is not JSON")

    try:
        value = json.loads(raw.decode("utf-8"), parse_constant=refuse)
        _check_depth(value, MAX_DEPTH)
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"the body is not JSON: {str(error)[:200]}") from None
    if not isinstance(value, dict):
        raise ProtocolError("the body must be a JSON object")
    return value


def _check_depth(value: Any, left: int) -> None:
    if left < 0:
        raise ValueError(f"deeper than {MAX_DEPTH}")
    if isinstance(value, str):
        value.encode("utf-8")  # a lone surrogate raises a ValueError
    for child in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        _check_depth(child, left - 1)
    for key in value if isinstance(value, dict) else ():
        key.encode("utf-8")


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**63


CHECKS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "number": (_number, "a number"),
    "integer": (_integer, "an integer"),
    "boolean": (lambda v: isinstance(v, bool), "true or false"),
    "string": (lambda v: isinstance(v, str), "a string"),
    "object": (lambda v: isinstance(v, dict), "an object"),
}
SAMPLING = {  # fields of the body that are fields of SamplingParams
    "temperature": "number",
    "top_p": "number",
    "top_k": "integer",
    "min_p": "number",
    "seed": "integer",
    "presence_penalty": "number",
    "frequency_penalty": "number",
    "repetition_penalty": "number",
    "min_tokens": "integer",
    "ignore_eos": "boolean",
    "n": "integer",
}


class _Body:
    """Typed reading of a body's fields; null is the same as missing."""

    def __init__(self, body: Mapping[str, Any]):
        self.body = body

    def get(self, name: str, kind: str) -> Any:
        value = self.body.get(name)
        if value is None:
            return None
        good, what = CHECKS[kind]
        if not good(value):
            raise ProtocolError(f"{name}: must be {what}", param=name)
        return value

    def sampling(self) -> dict[str, Any]:
        fields = {name: value for name, kind in SAMPLING.items() if (value := self.get(name, kind)) is not None}
        fields.setdefault("seed", None)
        if fields.get("top_k") == -1:  # other servers' word for "off"
            fields["top_k"] = 0
        if (stop := self.body.get("stop")) is not None:
            texts = [stop] if isinstance(stop, str) else stop
            if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
                raise ProtocolError("stop: must be a string or a list of strings", param="stop")
            fields["stop"] = tuple(texts)
        if (ids := self.body.get("stop_token_ids")) is not None:
            if not isinstance(ids, list) or not all(map(_integer, ids)):
                raise ProtocolError("stop_token_ids: must be a list of integers", param="stop_token_ids")
            fields["stop_token_ids"] = tuple(ids)
        if (bias := self.get("logit_bias", "object")) is not None:
            try:
                pairs = tuple((int(token), float(value)) for token, value in bias.items() if _number(value) or 1 / 0)
            except (ValueError, ZeroDivisionError):
                raise ProtocolError("logit_bias: must map token ids to numbers", param="logit_bias") from None
            if any(abs(value) > 100 for _, value in pairs):
                raise ProtocolError("logit_bias: values must be in [-100, 100]", param="logit_bias")
            fields["logit_bias"] = pairs
        return fields


def read_completion(body: Mapping[str, Any]) -> Asked:
    """The body of /v1/completions."""
    read = _Body(body)
    fields = read.sampling()
    fields["max_tokens"] = read.get("max_tokens", "integer")
    logprobs, echo = read.get("logprobs", "integer"), bool(read.get("echo", "boolean"))
    if logprobs is not None:
        fields["logprobs"] = logprobs
        if echo:
            fields["prompt_logprobs"] = logprobs
    if echo and fields["max_tokens"] == 0:  # the prompt and its log probabilities, and nothing new
        fields.setdefault("prompt_logprobs", 0)
    stream, usage = _streaming(read)
    if stream and echo:
        raise ProtocolError("echo: cannot be streamed", param="echo")
    return Asked(
        "completion", read.get("model", "string"), _prompts(body.get("prompt")), None, fields, stream, usage, echo,
        read.get("cache_salt", "string") or "",
    )  # fmt: skip


def _prompts(prompt: Any) -> list[str | list[int]]:
    """The four forms of a prompt: a text, texts, ids, lists of ids."""
    if prompt in ("", []) or (isinstance(prompt, list) and "" in prompt):
        raise ProtocolError("prompt: is empty; give at least one token", param="prompt")
    if isinstance(prompt, str):
        return [prompt]
    wrong = ProtocolError(
        "prompt: must be a string, a list of strings, token ids or lists of token ids", param="prompt"
    )
    if not isinstance(prompt, list) or not prompt:
        raise wrong
    if all(map(_integer, prompt)):
        return [list(prompt)]
    if len(prompt) > MAX_PROMPTS:
        raise ProtocolError(f"prompt: {len(prompt)} prompts; {MAX_PROMPTS} at most", param="prompt")
    for one in prompt:
        if not (isinstance(one, str) or (isinstance(one, list) and one and all(map(_integer, one)))):
            raise wrong
    return list(prompt)


def read_chat(body: Mapping[str, Any]) -> Asked:
    """The body of /v1/chat/completions."""
    read = _Body(body)
    fields = read.sampling()
    newer, older = read.get("max_completion_tokens", "integer"), read.get("max_tokens", "integer")
    fields["max_tokens"] = older if newer is None else newer
    if read.get("logprobs", "boolean"):
        fields["logprobs"] = read.get("top_logprobs", "integer") or 0
    elif read.get("top_logprobs", "integer"):
        raise ProtocolError("top_logprobs: needs logprobs=true", param="top_logprobs")
    stream, usage = _streaming(read)
    return Asked(
        "chat", read.get("model", "string"), [], _messages(body.get("messages")), fields, stream, usage, False,
        read.get("cache_salt", "string") or "",
    )  # fmt: skip


def _messages(messages: Any) -> list[dict[str, Any]]:
    if not isinstance(messages, list) or not messages:
        raise ProtocolError("messages: must be a list of at least one message", param="messages")
    out = []
    for i, message in enumerate(messages):
        where = f"messages[{i}]"
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise ProtocolError(f"{where}: must be an object with a role", param="messages")
        content = message.get("content")
        if isinstance(content, list):  # parts; only text is understood, and nothing is ever fetched
            if not all(
                isinstance(p, dict) and p.get("type") == "text" and isinstance(p.get("text"), str) for p in content
            ):
                raise ProtocolError(f"{where}.content: only parts of type text are understood", param="messages")
            content = "".join(part["text"] for part in content)
        if not isinstance(content, str):
            raise ProtocolError(f"{where}.content: must be a string", param="messages")
        out.append({**message, "content": content})
    return out


def _streaming(read: _Body) -> tuple[bool, bool]:
    stream = bool(read.get("stream", "boolean"))
    options = read.get("stream_options", "object") or {}
    if options and not stream:
        raise ProtocolError("stream_options: needs stream=true", param="stream_options")
    usage = options.get("include_usage", False)
    if not isinstance(usage, bool):
        raise ProtocolError("stream_options.include_usage: must be true or false", param="stream_options")
    return stream, usage


# --- writing -----------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Head:
    """What all chunks of a response have in common."""

    id: str
    created: int
    model: str
    kind: str

    def body(
        self, choices: list[dict[str, Any]], *, chunk: bool, usage: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        name = "text_completion" if self.kind == "completion" else f"chat.completion{'.chunk' if chunk else ''}"
        out = {"id": self.id, "object": name, "created": self.created, "model": self.model, "choices": choices}
        return out if usage is None else {**out, "usage": usage}


def usage_of(requests: Sequence[Request]) -> dict[str, Any]:
    """Prompts count once however many answers they get; completion tokens are ids, the ending one included."""
    prompts = [r for r in requests if r.index == 0]
    prompt, new = sum(len(r.prompt) for r in prompts), sum(len(r.outputs) for r in requests)
    cached = sum(r.cached for r in prompts)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": new,
        "total_tokens": prompt + new,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def token_text(tokenizer: Tokenizer | None, token: int) -> str:
    """A token as a string that no other token has: its text, or its bytes where they are no whole characters."""
    if tokenizer is None:
        return f"token_id:{token}"
    raw = tokenizer.piece(token)
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def chunk_of(head: Head, event: Event, index: int, first: bool, tokenizer: Tokenizer | None) -> dict[str, Any]:
    """One streamed chunk: what is new of one answer. A chat's role comes with its first text, so that no empty chunk passes for a token."""
    request, count, start = event.request, len(event.tokens), event.start
    choice: dict[str, Any] = {"index": index, "finish_reason": None}
    wanted = request.params.logprobs is not None and count > 0
    if head.kind == "completion":
        choice["text"] = event.text
        choice["logprobs"] = _legacy_logprobs(request, tokenizer, start, count, False) if wanted else None
    else:
        choice["delta"] = {"role": "assistant", "content": event.text} if first else {"content": event.text}
        choice["logprobs"] = {"content": _chat_logprobs(request, tokenizer, start, count)} if wanted else None
    return head.body([choice], chunk=True)


def end_chunk(head: Head, index: int, finish: str) -> dict[str, Any]:
    """The last chunk of one answer: nothing new, and why it ended."""
    choice: dict[str, Any] = {"index": index, "logprobs": None, "finish_reason": finish}
    choice["text" if head.kind == "completion" else "delta"] = "" if head.kind == "completion" else {}
    return head.body([choice], chunk=True)


def choice_of(
    head: Head, request: Request, text: str, index: int, echo: str | None, tokenizer: Tokenizer | None
) -> dict[str, Any]:
    """One answer of a response that was not streamed. echo: the prompt's text, to stand before it."""
    wanted = request.params.logprobs is not None
    choice: dict[str, Any] = {"index": index, "finish_reason": request.finish}
    count = len(request.outputs)
    if head.kind == "completion":
        choice["text"] = (echo or "") + text
        choice["logprobs"] = _legacy_logprobs(request, tokenizer, 0, count, echo is not None) if wanted else None
    else:
        choice["message"] = {"role": "assistant", "content": text}
        choice["logprobs"] = {"content": _chat_logprobs(request, tokenizer, 0, count)} if wanted else None
    return choice


def _finite(value: float | None) -> float | None:
    """JSON knows no infinity: an id that cannot come at all gets a number that clients take for one."""
    return value if value is None or value > NEVER else NEVER


def _legacy_logprobs(
    request: Request, tokenizer: Tokenizer | None, start: int, count: int, echo: bool
) -> dict[str, Any]:
    """Arrays of a completion's log probabilities; with echo the prompt's come first, and its first token has none.

    A token stands in its own table even when it is not among the most likely: clients compare it with the table's maximum.
    """
    ids = request.outputs[start : start + count]
    values: list[float | None] = [_finite(p) for p in request.logprobs[start : start + count]]
    tables: list[dict[int, float] | None] = list(request.top[start : start + count])
    if echo:
        ids = [*request.prompt, *ids]
        values, tables = [*map(_finite, request.prompt_logprobs), *values], [*request.prompt_top, *tables]
    texts = [token_text(tokenizer, token) for token in ids]
    offsets, at = [], 0
    for text in texts:
        offsets.append(at)
        at += len(text)
    top = [
        None
        if table is None or value is None
        else {token_text(tokenizer, t): _finite(p) for t, p in ({token: value} | table).items()}
        for token, value, table in zip(ids, values, tables, strict=True)
    ]
    return {"tokens": texts, "token_logprobs": values, "top_logprobs": top, "text_offset": offsets}


def _chat_logprobs(request: Request, tokenizer: Tokenizer | None, start: int, count: int) -> list[dict[str, Any]]:
    def entry(token: int, value: float) -> dict[str, Any]:
        raw = None if tokenizer is None else list(tokenizer.piece(token))
        return {"token": token_text(tokenizer, token), "logprob": _finite(value), "bytes": raw}

    out = []
    for i in range(start, start + count):
        table = sorted(request.top[i].items(), key=lambda pair: -pair[1])
        top = [entry(t, p) for t, p in table]
        out.append(entry(request.outputs[i], request.logprobs[i]) | {"top_logprobs": top})
    return out
