"""The OpenAI protocol over HTTP, on a `Service`: routes, limits, keys, streams. Starlette knows HTTP, `protocol.py` the bodies.

A request belongs to the coroutine that answers it: however that ends (done, deadline, the client gone), leaving the loop over the
service's stream aborts it. Nothing a client sends is logged, fetched or executed.
"""

import asyncio
import contextlib
import hmac
import json
import re
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from importlib.resources import files
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from jaxllm.data.chat import ChatTemplate
from jaxllm.errors import UserError
from jaxllm.inference import protocol
from jaxllm.inference.answers import Event
from jaxllm.inference.engine import QueueFull
from jaxllm.inference.metrics import Metrics
from jaxllm.inference.protocol import Asked, Head, ProtocolError
from jaxllm.inference.sampling import SamplingParams
from jaxllm.inference.service import EngineDead, Service
from jaxllm.inference.settings import ServeSettings

RETRY_SECONDS = "1"
OPEN = frozenset({"/health", "/"})  # reachable without a key
DONE = b"data: [DONE]\n\n"


class Server:
    """One model behind HTTP. `app` is the ASGI application.

    Args:
        keys: any of which opens the protected routes; none = no key is asked for.
        log: told one line a request: method, path, status, seconds, tokens; never what was said.
    """

    def __init__(
        self,
        service: Service,
        settings: ServeSettings,
        model: str,
        keys: Sequence[str] = (),
        metrics: Metrics | None = None,
        log: Callable[[str], None] | None = None,
    ):
        self.service, self.settings, self.model = service, settings, model
        self.metrics = metrics or Metrics(model, aliases=settings.vllm_metrics)
        self.metrics.service = service
        self._keys = [key.encode() for key in keys]
        self._log = log or (lambda line: None)
        self._created = int(time.time())
        self._chat: ChatTemplate | None = None
        if service.engine.tokenizer is not None:
            with contextlib.suppress(UserError):
                self._chat = ChatTemplate(service.engine.tokenizer)
        self.app = Starlette(
            routes=[
                Route("/v1/completions", self._guarded(self._completions), methods=["POST"]),
                Route("/v1/chat/completions", self._guarded(self._chat_completions), methods=["POST"]),
                Route("/v1/models", self._guarded(self._models)),
                Route("/v1/models/{name:path}", self._guarded(self._one_model)),
                Route("/health", self._guarded(self._health)),
                Route("/metrics", self._guarded(self._metrics)),
                Route("/tokenize", self._guarded(self._tokenize), methods=["POST"]),
                Route("/detokenize", self._guarded(self._detokenize), methods=["POST"]),
                Route("/", self._guarded(self._page)),
            ],
            exception_handlers={HTTPException: self._http_error},
        )

    # --- around every route ---------------------------------------------------------------------------------------

    def _guarded(self, handler: Callable[[Request], Any]) -> Callable[[Request], Any]:
        """Keys before, errors after."""

        async def run(request: Request) -> Response:
            start = time.monotonic()
            try:
                self._authorise(request)
                response = await handler(request)
            except ProtocolError as error:
                response = self._error(error)
            except QueueFull as error:
                response = self._error(ProtocolError(str(error), 429))
                response.headers["Retry-After"] = RETRY_SECONDS
            except UserError as error:
                response = self._error(ProtocolError(str(error), param=_param(str(error))))
            except EngineDead as error:
                response = self._error(ProtocolError(str(error), 503))
            except ClientDisconnect:
                response = Response(status_code=499)
            response.headers["X-Request-Id"] = request_id(request)
            self._log(f"{request.method} {request.url.path} {response.status_code} {time.monotonic() - start:.3f} s")
            return response

        return run

    def _authorise(self, request: Request) -> None:
        path = request.url.path
        if not self._keys or path in OPEN or (path == "/metrics" and self.settings.metrics_public):
            return
        kind, _, key = request.headers.get("authorization", "").partition(" ")
        given = key.strip().encode("utf-8", "surrogateescape")
        matches = [hmac.compare_digest(given, known) for known in self._keys]  # all of them, in equal time
        if kind.lower() != "bearer" or not any(matches):
            raise ProtocolError("a valid API key is needed: Authorization: Bearer KEY", 401, code="invalid_api_key")

    @staticmethod
    def _error(error: ProtocolError) -> Response:
        return JSONResponse(error.body(), error.status)

    async def _http_error(self, request: Request, error: Exception) -> Response:
        status = error.status_code if isinstance(error, HTTPException) else 500
        what = {404: f"no such path: {request.url.path[:200]}", 405: f"{request.method} is not allowed here"}
        headers = getattr(error, "headers", None)
        return JSONResponse(ProtocolError(what.get(status, str(error)), status).body(), status, headers)

    async def _body(self, request: Request) -> dict[str, Any]:
        """The JSON object of a request, within the limits of size and time."""
        kind = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
        if kind != "application/json":
            raise ProtocolError(f"content-type: {kind[:100]} is not application/json", 415)
        limit, raw = self.settings.max_body, bytearray()
        too_large = ProtocolError(f"the body is larger than {limit} bytes", 413)
        if int(_digits(request.headers.get("content-length", "0"))) > limit:
            raise too_large
        try:
            async with asyncio.timeout(self.settings.read_timeout_s):
                async for part in request.stream():
                    raw += part
                    if len(raw) > limit:
                        raise too_large
        except TimeoutError:
            raise ProtocolError("the body took too long to arrive", 408) from None
        return protocol.parse_json(bytes(raw))

    # --- completions ----------------------------------------------------------------------------------------------

    async def _completions(self, request: Request) -> Response:
        asked = protocol.read_completion(await self._body(request))
        return await self._answer(request, asked, [self.service.engine.encode(p) for p in asked.prompts])

    async def _chat_completions(self, request: Request) -> Response:
        asked = protocol.read_chat(await self._body(request))
        if self._chat is None:
            raise ProtocolError("this model has no chat template; use /v1/completions")
        assert asked.messages is not None
        return await self._answer(request, asked, [self._chat.encode(asked.messages)])

    async def _answer(self, request: Request, asked: Asked, prompts: list[list[int]]) -> Response:
        if self.service.draining:
            raise ProtocolError("the server is shutting down", 503)
        if asked.model is not None and asked.model != self.model:
            raise ProtocolError(f"the model {asked.model[:200]!r} does not exist", 404, "model", "model_not_found")
        engine = self.service.engine
        params = []
        for prompt in prompts:
            one = asked.params(engine.sizes.length - len(prompt))
            engine.check(prompt, one)
            params.append(one)
        name = ("cmpl-" if asked.kind == "completion" else "chatcmpl-") + uuid.uuid4().hex
        head = Head(name, int(time.time()), self.model, asked.kind)
        events = self._events(prompts, params, name, asked.salt)
        if asked.stream:
            try:  # what is refused when it is submitted (a full queue) must still become a status
                first = await _while_there(request, anext(events))
            except StopAsyncIteration:
                raise ProtocolError("nothing to answer") from None
            stream = self._stream(head, asked, events, first)
            headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
            return StreamingResponse(stream, media_type="text/event-stream", headers=headers)
        return await self._whole(request, head, asked, prompts, events)

    async def _events(
        self, prompts: list[list[int]], params: list[SamplingParams], name: str, salt: str
    ) -> AsyncGenerator[tuple[int, Event], None]:
        """Events of all prompts as they come, each with the index of its choice."""
        queue: asyncio.Queue[tuple[int, Event] | BaseException | None] = asyncio.Queue()

        async def one(i: int) -> None:
            try:
                async with contextlib.aclosing(
                    self.service.stream(prompts[i], params[i], id=name, salt=salt)
                ) as stream:
                    async for event in stream:
                        queue.put_nowait((i * params[i].n + event.request.index, event))
                queue.put_nowait(None)
            except Exception as error:  # told to whoever reads the queue
                queue.put_nowait(error)

        tasks = [asyncio.create_task(one(i)) for i in range(len(prompts))]
        left = len(tasks)
        try:
            async with asyncio.timeout(self.settings.deadline_s):
                while left:
                    item = await queue.get()
                    if isinstance(item, BaseException):
                        raise item
                    if item is None:
                        left -= 1
                    else:
                        yield item
        except TimeoutError:
            raise ProtocolError(f"the request took longer than {self.settings.deadline_s:g} s", 408) from None
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _whole(
        self,
        request: Request,
        head: Head,
        asked: Asked,
        prompts: list[list[int]],
        events: AsyncGenerator[tuple[int, Event], None],
    ) -> Response:
        """Collect all answers, and stop at once when the client has gone: nobody else would tell the engine."""

        async def collect() -> dict[int, tuple[Any, str]]:
            texts: dict[int, list[str]] = {}
            ended: dict[int, tuple[Any, str]] = {}
            async with contextlib.aclosing(events):
                async for index, event in events:
                    texts.setdefault(index, []).append(event.text)
                    if event.finish == "error":
                        raise ProtocolError(event.request.error or "the engine failed", 500)
                    if event.finish == "abort":
                        raise ProtocolError("the server is shutting down", 503)
                    if event.finish is not None:
                        ended[index] = (event.request, "".join(texts[index]))
            return ended

        ended = await _while_there(request, collect())
        tokenizer = self.service.engine.tokenizer
        choices = []
        for index, (row, text) in sorted(ended.items()):
            echo = None
            if asked.echo:
                echo = "" if tokenizer is None else tokenizer.decode(row.prompt)
            choices.append(protocol.choice_of(head, row, text, index, echo, tokenizer))
        usage = protocol.usage_of([row for row, _ in ended.values()])
        return JSONResponse(head.body(choices, chunk=False, usage=usage))

    async def _stream(
        self, head: Head, asked: Asked, events: AsyncGenerator[tuple[int, Event], None], first: tuple[int, Event]
    ) -> AsyncGenerator[bytes, None]:
        """Server-sent events: one chunk a step and answer, one end an answer, usage if asked for, [DONE]."""
        begun: set[int] = set()
        rows = []
        tokenizer = self.service.engine.tokenizer
        try:
            async with contextlib.aclosing(events):
                item: tuple[int, Event] | None = first
                while item is not None:
                    index, event = item
                    if event.finish == "error":
                        raise ProtocolError(event.request.error or "the engine failed", 500)
                    if event.finish == "abort":
                        raise ProtocolError("the server is shutting down", 503)
                    if event.text or event.tokens:
                        yield _sse(protocol.chunk_of(head, event, index, index not in begun, tokenizer))
                        begun.add(index)
                    if event.finish is not None:
                        yield _sse(protocol.end_chunk(head, index, event.finish))
                        rows.append(event.request)
                    item = await anext(events, None)
            if asked.usage:
                yield _sse(head.body([], chunk=True, usage=protocol.usage_of(rows)))
        except (ProtocolError, UserError, EngineDead) as error:
            known = error if isinstance(error, ProtocolError) else ProtocolError(str(error), 503)
            yield _sse(known.body())
        yield DONE

    # --- everything else ------------------------------------------------------------------------------------------

    async def _models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._model_card()]})

    async def _one_model(self, request: Request) -> Response:
        if request.path_params["name"] != self.model:
            raise ProtocolError(
                f"the model {request.path_params['name'][:200]!r} does not exist", 404, "model", "model_not_found"
            )
        return JSONResponse(self._model_card())

    def _model_card(self) -> dict[str, Any]:
        length = self.service.engine.sizes.length
        return {
            "id": self.model,
            "object": "model",
            "created": self._created,
            "owned_by": "jaxllm",
            "max_model_len": length,
        }

    async def _health(self, request: Request) -> Response:
        service = self.service
        if service.healthy:
            return JSONResponse({"status": "ok"})
        status = "draining" if service.draining else "starting" if not service.ready else "failed"
        return JSONResponse({"status": status}, 503)

    async def _metrics(self, request: Request) -> Response:
        return Response(self.metrics.render(), media_type="text/plain; version=0.0.4")

    async def _tokenize(self, request: Request) -> Response:
        body = await self._body(request)
        tokenizer = self.service.engine.tokenizer
        text = body.get("prompt")
        if tokenizer is None or not isinstance(text, str):
            raise ProtocolError("prompt: must be a string", param="prompt")
        ids = tokenizer.prompt(text) if body.get("add_special_tokens", True) is not False else tokenizer.encode(text)
        return JSONResponse({"tokens": ids, "count": len(ids), "max_model_len": self.service.engine.sizes.length})

    async def _detokenize(self, request: Request) -> Response:
        body = await self._body(request)
        tokenizer, ids = self.service.engine.tokenizer, body.get("tokens")
        size = self.service.engine.vocab_size
        if tokenizer is None or not isinstance(ids, list) or not all(type(i) is int and 0 <= i < size for i in ids):
            raise ProtocolError(f"tokens: must be a list of ids in [0, {size})", param="tokens")
        return JSONResponse({"prompt": tokenizer.decode(ids)})

    async def _page(self, request: Request) -> Response:
        page = files("jaxllm.inference").joinpath("chat_page.html").read_text(encoding="utf-8")
        policy = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'"
        return HTMLResponse(page, headers={"Content-Security-Policy": policy})


def _sse(body: Mapping[str, Any]) -> bytes:
    return b"data: " + json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace") + b"\n\n"


def _param(message: str) -> str | None:
    """The field that a line of ours begins with."""
    found = re.match(r"([a-z_]+)[=:\[]", message)
    return found.group(1) if found else None


def _digits(text: str) -> str:
    return text if text.isascii() and text.isdigit() and len(text) < 19 else str(2**63)


async def _while_there(request: Request, work: Coroutine[Any, Any, Any]) -> Any:
    """The result of some work, which is cancelled when the client goes: then ClientDisconnect."""
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        for one in (task, gone):
            one.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _disconnected(request: Request) -> None:
    """Returns when the client has gone."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def request_id(request: Request) -> str:
    """The client's own id, if it is one that is safe to repeat, or a new one."""
    given = request.headers.get("x-request-id", "")
    if re.fullmatch(r"[A-Za-z0-9._-]{1,128}", given):
        return given
    known: str | None = request.scope.setdefault("jaxllm.request_id", uuid.uuid4().hex)
    return known or ""
