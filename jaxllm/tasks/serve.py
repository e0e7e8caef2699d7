"""`task=serve`: a trained model behind the OpenAI protocol, until it is told to stop.

SIGTERM or Ctrl-C: no new requests (503), running ones go on for `server.drain_s` seconds at most, then exit code 0. A second signal ends
the process at once.
"""

from __future__ import annotations

import asyncio
import functools
import os
import signal
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

import jax

from jaxllm.config import Config
from jaxllm.errors import UserError
from jaxllm.inference.engine import Engine
from jaxllm.inference.settings import ServeSettings
from jaxllm.tasks import TaskIO
from jaxllm.tasks.source import Source, open_source

MIN_KEY = 8  # characters


def run(cfg: Config, io: TaskIO) -> dict[str, Any]:
    """Serve. JSON fields: `requests, prompt_tokens, new_tokens, compile_s, compiled, served_s`."""
    try:
        import uvicorn

        from jaxllm.inference.metrics import Metrics
        from jaxllm.inference.server import Server
        from jaxllm.inference.service import Service
    except ImportError as error:
        raise UserError(f"task=serve: needs {error.name}; install jaxllm[serve]") from None
    settings: ServeSettings = cfg.section("server")
    keys = read_keys(cfg, settings)
    engine, name = open_engine(cfg, io, settings)
    metrics = Metrics(name, aliases=settings.vllm_metrics)
    service = Service(engine, metrics.observe)
    server = Server(service, settings, name, keys, metrics, lambda line: io.log(line, "debug"))
    if settings.host not in ("127.0.0.1", "localhost", "::1") and not keys:
        io.log(f"server.host={settings.host}: other machines can reach this server, and it asks for no key", "warning")

    class Http(uvicorn.Server):
        """Drains before it stops. Signals are handled here alone, so that a drained server is a success."""

        def handle_exit(self, sig: int, frame: FrameType | None) -> None:
            if service.draining:
                signal.signal(sig, signal.SIG_DFL)
                signal.raise_signal(sig)
            service.draining = True
            io.log(f"{signal.Signals(sig).name}: finishing {service.live} requests; once more ends at once")

        async def on_tick(self, counter: int) -> bool:
            if service.draining:
                self.drain_started = getattr(self, "drain_started", time.monotonic())
                late = time.monotonic() - self.drain_started > settings.drain_s
                if late and service.live:
                    service.abort_all()
                if not service.live or time.monotonic() - self.drain_started > settings.drain_s + 2:
                    return True
            return await super().on_tick(counter)

    http = Http(
        uvicorn.Config(
            server.app,
            host=settings.host,
            port=settings.port,
            log_config=None,  # its own closes every log handler of the process, some of which then close stderr
            log_level="warning",
            access_log=False,
            server_header=False,
            limit_concurrency=settings.max_connections,
            h11_max_incomplete_event_size=16 * 1024,
            timeout_keep_alive=30,
            timeout_graceful_shutdown=5,
        )
    )
    service.start()
    start = time.monotonic()
    try:
        asyncio.run(_serve(http, io, name))
    finally:
        service.close()
    if service.error is not None:
        raise RuntimeError("the engine has stopped") from service.error
    return {
        "requests": metrics.ended,
        "prompt_tokens": metrics.prompt_tokens,
        "new_tokens": metrics.new_tokens,
        "compiled": len(engine.runner.report),
        "compile_s": round(sum(row["seconds"] for row in engine.runner.report), 3),
        "served_s": round(time.monotonic() - start, 3),
    }


async def _serve(http: Any, io: TaskIO, name: str) -> None:
    serving = asyncio.ensure_future(http.serve())
    while not http.started and not serving.done():
        await asyncio.sleep(0.02)
    if http.started:
        host, port = http.servers[0].sockets[0].getsockname()[:2]
        io.log(f"{name} at http://{host}:{port} (chat page at /, metrics at /metrics)")
    try:
        await serving
    except SystemExit:  # uvicorn's word for an address that is taken
        raise UserError(f"server.port: cannot listen on {http.config.host}:{http.config.port}; is it in use?") from None


def read_keys(cfg: Config, settings: ServeSettings) -> list[str]:
    """API keys from the environment or a file; never from the command line, which everybody on the machine can read."""
    keys = []
    if settings.api_key_env is not None:
        key = os.environ.get(settings.api_key_env, "")
        if not key:
            raise UserError(f"server.api_key_env: the environment has no {settings.api_key_env}")
        keys.append(key)
    if settings.api_key_file is not None:
        path = cfg.path(settings.api_key_file)
        try:
            keys += [line.strip() for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"server.api_key_file={path}: cannot be read: {error}") from None
    for key in keys:
        if len(key) < MIN_KEY:
            raise UserError(f"server: an API key of {len(key)} characters can be guessed; use at least {MIN_KEY}")
    return keys


def opened(cfg: Config, settings: ServeSettings, warn: Callable[[str], None] | None = None) -> Source:
    """What `source=` names, in the mode that is to be served."""
    if cfg.source is None:
        raise UserError("source: missing; give source=<run folder, checkpoint, Hugging Face folder or GGUF file>")
    overrides = settings.mode() | {key: value for key, value in cfg.explicit.items() if key.startswith("model.")}
    return open_source(cfg.path(cfg.source), overrides=overrides, allow_targets=cfg.allow_targets, warn=warn)


def open_engine(cfg: Config, io: TaskIO, settings: ServeSettings) -> tuple[Engine, str]:
    """The engine of `source=`, all its shapes compiled, and the model's name."""
    source = opened(cfg, settings, io.log)
    name = settings.model_name or cfg.path(str(cfg.source)).name
    weights = f"{source.folder}@{source.step}"
    late = functools.partial(io.log, level="warning")
    engine = Engine(source.model, source.params, source.tokenizer, settings, name=name, weights=weights, log=late)
    io.log(f"checkpoint {source.folder} (step {source.step}); compiling on {jax.default_backend()}")
    start = time.monotonic()
    engine.runner.warm_up(settings.prompt_logprobs)
    for row in engine.runner.report:
        io.log(f"  {row['call']:<9}{'x'.join(map(str, row['shape'])):>10}{row['seconds']:>9.2f} s", "debug")
    io.log(
        f"{len(engine.runner.report)} programs in {time.monotonic() - start:.1f} s; cache {engine.runner.cache_bytes / 2**20:,.1f} MiB"
    )
    return engine, name
