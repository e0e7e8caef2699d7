"""What a server counts, for Prometheus. Names are our own; `aliases` publishes the same numbers under vLLM's as well.

Times are of one process's monotonic clock. The time to the first token counts from the arrival of the request, before tokenisation.
"""

import time
from collections.abc import Callable
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from jaxllm.inference.answers import Event
from jaxllm.inference.service import Service

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 50000, 100000)


class Metrics:
    """`observe` every event of a service; `render` is what a scraper reads."""

    def __init__(self, model: str, *, aliases: bool = False):
        self._model, self._sets = model, [_Set("jaxllm_", model), *([_Set("vllm:", model)] if aliases else [])]
        self._last: dict[int, float] = {}  # request number -> when its newest token was seen
        self.service: Service | None = None
        self.ended = self.prompt_tokens = self.new_tokens = 0
        for one in self._sets:
            one.watch(self._state)

    def _state(self, name: str) -> float:
        engine = None if self.service is None else self.service.engine
        if engine is None:
            return 0.0
        return {
            "running": lambda: len(engine.scheduler.running),
            "waiting": lambda: len(engine.scheduler.waiting),
            "usage": lambda: engine.places.usage,
            "queries": lambda: engine.prefix_queries,
            "hits": lambda: engine.prefix_hits,
            "preemptions": lambda: engine.scheduler.preemptions,
        }[name]()

    def observe(self, event: Event, seconds: float) -> None:
        del seconds
        now, request = time.monotonic(), event.request
        self.new_tokens += len(event.tokens)
        if event.finish is not None:
            self.ended += 1
            self.prompt_tokens += len(request.prompt)
        for one in self._sets:
            if event.tokens:
                one.generated.inc(len(event.tokens))
                last = self._last.get(request.number)
                if last is None:
                    one.ttft.observe(now - request.arrival)
                    one.prompt.inc(len(request.prompt))
                else:
                    one.itl.observe(now - last)
            if event.finish is not None:
                one.end(event.finish, now, request)
        if event.tokens:
            self._last[request.number] = now
        if event.finish is not None:
            self._last.pop(request.number, None)

    def render(self) -> bytes:
        return b"".join(generate_latest(one.registry) for one in self._sets)


class _Set:
    """The metrics under one prefix."""

    def __init__(self, prefix: str, model: str):
        self.registry = CollectorRegistry()
        labels = {"labelnames": ("model_name",), "registry": self.registry}

        def make(kind: Any, name: str, text: str, **kwargs: Any) -> Any:
            return kind(prefix + name, text, **labels, **kwargs).labels(model_name=model)

        def gauge(name: str, text: str) -> Any:
            return make(Gauge, name, text)

        def histogram(name: str, text: str, buckets: Any = SECONDS) -> Any:
            return make(Histogram, name, text, buckets=buckets)

        self._gauges = {
            "running": gauge("num_requests_running", "Requests that run."),
            "waiting": gauge("num_requests_waiting", "Requests that wait."),
            "usage": gauge("kv_cache_usage_perc", "Share of the cache that is held, 0 to 1."),
            "queries": gauge("prefix_cache_queries", "Tokens of prompts that were looked up."),
            "hits": gauge("prefix_cache_hits", "Tokens of prompts that were found."),
            "preemptions": gauge("num_preemptions_total", "Requests that were computed again."),
        }
        self.prompt = make(Counter, "prompt_tokens", "Tokens of prompts.")
        self.generated = make(Counter, "generation_tokens", "New tokens.")
        names = ("model_name", "finished_reason")
        self._success = Counter(prefix + "request_success", "Requests that ended.", names, registry=self.registry)
        self._model = model
        self.ttft = histogram("time_to_first_token_seconds", "From arrival to the first token.")
        self.itl = histogram("inter_token_latency_seconds", "Between two tokens of a request.")
        self._e2e = histogram("e2e_request_latency_seconds", "From arrival to the end.")
        self._queue = histogram("request_queue_time_seconds", "From arrival to the first step.")
        self._prefill = histogram("request_prefill_time_seconds", "From the first step to the first token.")
        self._decode = histogram("request_decode_time_seconds", "From the first token to the end.")
        self._prompt_tokens = histogram("request_prompt_tokens", "Tokens of a prompt.", TOKENS)
        self._new_tokens = histogram("request_generation_tokens", "New tokens of a request.", TOKENS)

    def watch(self, state: Callable[[str], float]) -> None:
        for name, gauge in self._gauges.items():
            gauge.set_function(lambda name=name: state(name))

    def end(self, finish: str, now: float, request: Any) -> None:
        self._success.labels(model_name=self._model, finished_reason=finish).inc()
        self._e2e.observe(now - request.arrival)
        self._prompt_tokens.observe(len(request.prompt))
        self._new_tokens.observe(len(request.outputs))
        if request.started is not None:
            self._queue.observe(request.started - request.arrival)
            if request.first is not None:
                self._prefill.observe(request.first - request.started)
                self._decode.observe(now - request.first)
