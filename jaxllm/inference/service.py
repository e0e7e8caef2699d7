"""An engine behind asyncio: one thread turns the engine, coroutines ask it and are told what is new.

    service = Service(engine);  service.start()
    async for event in service.stream(prompt, params): ...

Whoever iterates owns the request: when it stops, for whatever reason, the request is aborted and its pages are free again.
"""

import asyncio
import threading
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any

from jaxllm.inference.answers import Event
from jaxllm.inference.engine import Engine
from jaxllm.inference.requests import Request, State
from jaxllm.inference.sampling import SamplingParams

IDLE_SECONDS = 0.5  # the thread looks around at least so often
Observer = Callable[[Event, float], None]


class EngineDead(RuntimeError):
    """The engine's thread has ended: nothing can be served any more."""


class _Client:
    """Where the events of one prompt's requests go."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.queue: asyncio.Queue[Event | BaseException] = asyncio.Queue()

    def put(self, item: Event | BaseException) -> None:
        """From any thread; a loop that has closed has nobody to tell."""
        try:
            self.loop.call_soon_threadsafe(self.queue.put_nowait, item)
        except RuntimeError:
            pass


class Service:
    """Runs an engine in a thread of its own.

    observe: called in that thread with every event and the seconds of its step, for metrics.
    """

    def __init__(self, engine: Engine, observe: Observer | None = None):
        self.engine, self._observe = engine, observe
        self.draining = False  # no new requests
        self.error: BaseException | None = None
        self.ready = False
        self.failed_steps = 0
        self._wake = threading.Condition()
        self._stop = False
        self._clients: set[_Client] = set()
        self._requests: set[Request] = set()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        self._thread.start()
        self.ready = True

    def close(self, timeout: float = 10.0) -> None:
        """Stop the thread after its step. Whoever still waits is told."""
        self._stop = True
        with self._wake:
            self._wake.notify_all()
        if self._thread.is_alive():
            self._thread.join(timeout)

    @property
    def healthy(self) -> bool:
        return self.ready and self.error is None and not self.draining and self._thread.is_alive()

    @property
    def live(self) -> int:
        """Requests that have not ended."""
        return len(self._requests)

    def abort_all(self) -> None:
        for request in list(self._requests):
            self.engine.abort(request)
        with self._wake:
            self._wake.notify_all()

    async def stream(
        self, prompt: str | Sequence[int], params: SamplingParams, *, id: str | None = None, salt: str = ""
    ) -> AsyncGenerator[Event, None]:
        """Events of a prompt's `params.n` requests until the last of them has ended. Raises UserError at once for what is refused."""
        if self.error is not None:
            raise EngineDead(str(self.error))
        client = _Client()
        requests = self.engine.submit(prompt, params, id=id, salt=salt, client=client)
        self._clients.add(client)
        self._requests.update(requests)
        with self._wake:
            self._wake.notify_all()
        left = len(requests)
        try:
            while left:
                event = await client.queue.get()
                if isinstance(event, BaseException):
                    raise event
                left -= event.finish is not None
                yield event
        finally:
            self._clients.discard(client)
            for request in requests:
                if request.state is not State.DONE:
                    self.engine.abort(request)
            self._requests.difference_update(requests)
            with self._wake:
                self._wake.notify_all()

    # --- the thread -----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._stop:
                if not self.engine.busy:
                    with self._wake:
                        if not self.engine.busy and not self._stop:
                            self._wake.wait(IDLE_SECONDS)
                    continue
                start = time.monotonic()
                events = self.engine.step()
                seconds = time.monotonic() - start
                self.failed_steps += any(event.finish == "error" for event in events)
                for event in events:
                    self._tell(event, seconds)
        except BaseException as error:  # whatever it was, those who wait must know
            self.error = error
        finally:
            gone = EngineDead(f"the engine has stopped: {self.error or 'it was closed'}")
            for client in list(self._clients):
                client.put(gone)

    def _tell(self, event: Event, seconds: float) -> None:
        if self._observe is not None:
            self._observe(event, seconds)
        client: Any = event.request.client
        if isinstance(client, _Client):
            client.put(event)
