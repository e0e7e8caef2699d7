"""The server over real sockets: the OpenAI client, the forms that clients rely on, every mistake, disconnects, load, and draining."""

import asyncio
import concurrent.futures
import json
import re
import socket
import threading
import time

import engines
import httpx
import openai
import pytest
import uvicorn
from hypothesis import given, settings
from hypothesis import strategies as st
from pages import chromium
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route

from jaxllm.inference.answers import Event
from jaxllm.inference.sampling import GREEDY, SamplingParams
from jaxllm.inference.server import Server
from jaxllm.inference.service import Service
from jaxllm.inference.settings import ServeSettings

KEY = "a-key-of-tests"


class Running:
    """A server on a free port in a thread, around an engine that outlives it."""

    def __init__(self, keys=(), **fields):
        self.engine = engines.as_new(engines.made())
        self.service = Service(self.engine)
        self.server = Server(self.service, ServeSettings(**fields), "tiny", keys)
        self.service._observe = self.server.metrics.observe
        self.service.start()
        self._http = uvicorn.Server(uvicorn.Config(self.server.app, port=0, log_config=None, log_level="error"))
        self._thread = threading.Thread(target=self._http.run, daemon=True)
        self._thread.start()
        while not self._http.started:
            time.sleep(0.01)
        self.port = self._http.servers[0].sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"

    def close(self):
        self._http.should_exit = True
        self._thread.join(20)
        self.service.close()
        while self.engine.busy:
            self.engine.step()

    def idle(self, seconds=5.0):
        """Wait until nothing runs; whether every page came back."""
        end = time.monotonic() + seconds
        while time.monotonic() < end and (self.engine.busy or self.service.live):
            time.sleep(0.01)
        pool = self.engine.places.pool
        return not self.engine.busy and pool.free == pool.total and self.engine.places.free_slots == engines.ROWS


@pytest.fixture(scope="module")
def running():
    server = Running()
    traces = server.engine.runner.traces
    yield server
    assert server.idle()
    server.close()
    assert server.engine.runner.traces == traces


@pytest.fixture(scope="module")
def client(running):
    with openai.OpenAI(base_url=running.url + "/v1", api_key="any", max_retries=0) as client:
        yield client


def post(running, path, **kwargs):
    return httpx.post(running.url + path, timeout=60, **kwargs)


def sse(text):
    """The events of a stream: JSON bodies, and that it ends as it must."""
    parts = text.split("\n\n")
    assert parts[-1] == "" and parts[-2] == "data: [DONE]"
    assert all(part.startswith("data: ") for part in parts[:-1])
    return [json.loads(part.removeprefix("data: ")) for part in parts[:-2]]


# --- what clients rely on ----------------------------------------------------------------------------------------------------------


def test_a_stream_is_the_whole_answer_in_pieces(running, client):
    asked = {
        "model": "tiny",
        "prompt": "hello",
        "max_tokens": 12,
        "seed": 5,
        "temperature": 1.0,
        "extra_body": {"ignore_eos": True},
    }
    whole = client.completions.create(**asked)
    assert (
        whole.usage.prompt_tokens == 5
        and whole.usage.completion_tokens == 12
        and whole.choices[0].finish_reason == "length"
    )
    chunks = list(client.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    assert "".join(c.choices[0].text for c in chunks if c.choices) == whole.choices[0].text
    assert [c.choices[0].finish_reason for c in chunks if c.choices] == [None] * (len(chunks) - 2) + ["length"]
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == 12
    assert len({(c.id, c.created, c.model) for c in chunks}) == 1
    plain = list(client.completions.create(**asked, stream=True))
    assert all(c.choices and c.usage is None for c in plain)  # no usage chunk unless it is asked for
    direct = running.engine.tokenizer.decode
    assert whole.choices[0].text == direct(
        list(_tokens(running, "hello", SamplingParams(seed=5, max_tokens=12, ignore_eos=True)))
    )


def _tokens(running, prompt, params):
    async def ask():
        return [t async for e in running.service.stream(prompt, params) for t in e.tokens]

    return asyncio.run(ask())


def test_chats(client):
    asked = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": 6,
        "seed": 1,
        "logprobs": True,
        "top_logprobs": 2,
    }
    whole = client.chat.completions.create(**asked)
    choice = whole.choices[0]
    assert choice.message.role == "assistant"
    assert len(choice.logprobs.content) == whole.usage.completion_tokens
    assert all(len(entry.top_logprobs) == 2 for entry in choice.logprobs.content)
    chunks = list(client.chat.completions.create(**asked, stream=True))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert all(c.choices[0].delta.role is None for c in chunks[1:])
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == choice.message.content
    assert chunks[-1].choices[0].finish_reason == choice.finish_reason and chunks[-1].choices[0].delta.content is None


def test_several_prompts_and_answers_keep_their_indices(client):
    many = client.completions.create(model="tiny", prompt=["a", "bb", [99, 99, 99]], n=2, max_tokens=3, seed=3)
    assert [c.index for c in many.choices] == list(range(6))
    assert many.usage.prompt_tokens == 6
    for i, prompt in enumerate(("a", "bb", "ccc")):
        one = client.completions.create(model="tiny", prompt=prompt, n=2, max_tokens=3, seed=3)
        assert [c.text for c in one.choices] == [c.text for c in many.choices[2 * i : 2 * i + 2]]
    ends = {}
    for chunk in client.completions.create(model="tiny", prompt=["a", "bb"], n=2, max_tokens=3, seed=3, stream=True):
        choice = chunk.choices[0]
        ends.setdefault(choice.index, []).append(choice.finish_reason)
    assert sorted(ends) == [0, 1, 2, 3]
    assert all(len([f for f in reasons if f]) == 1 and reasons[-1] for reasons in ends.values())


def test_log_likelihoods_as_the_evaluation_harness_reads_them(running, client):
    """Ids in, `echo` with one new token: arrays over prompt and token, the first entry null, the own token in its table, to the bit."""
    context, continuation = list(b"the cat "), list(b"sat")
    ids = context + continuation
    asked = {
        "model": "tiny",
        "prompt": [ids, ids],
        "max_tokens": 1,
        "logprobs": 1,
        "echo": True,
        "temperature": 0,
        "seed": 1234,
    }
    reply = client.completions.create(**asked)
    answer = running.engine  # the truth: the engine's own scores
    scored = _scores(running, ids)
    for choice in reply.choices:
        lp = choice.logprobs
        assert len(lp.token_logprobs) == len(lp.tokens) == len(lp.top_logprobs) == len(ids) + 1
        assert lp.token_logprobs[0] is None and lp.top_logprobs[0] is None
        part = slice(len(context), -1)
        # float32 in another order: some units in the last place of the largest logits that the differences are taken of
        ulps = 8 * 2.0**-24 * max(abs(x) for x in scored[part])
        assert lp.token_logprobs[part] == pytest.approx(scored[part], abs=ulps, rel=0)
        for token, value, table in zip(lp.tokens[part], lp.token_logprobs[part], lp.top_logprobs[part], strict=True):
            assert table[token] == value
        assert lp.token_logprobs[-1] == max(lp.top_logprobs[-1].values())  # greedy
        assert choice.text.startswith("the cat sat")
    assert answer.vocab_size == 258
    only = client.completions.create(**(asked | {"max_tokens": 0}))
    for choice, longer in zip(only.choices, reply.choices, strict=True):  # the prompt alone: nothing is drawn
        assert choice.text == "the cat sat" and choice.finish_reason == "length"
        assert choice.logprobs.token_logprobs == longer.logprobs.token_logprobs[:-1]
        assert choice.logprobs.top_logprobs == longer.logprobs.top_logprobs[:-1]
    assert only.usage.completion_tokens == 0
    plain = client.completions.create(model="tiny", prompt="the cat", max_tokens=0, echo=True)
    assert plain.choices[0].text == "the cat" and plain.choices[0].logprobs is None


def _scores(running, ids):
    import jax
    import jax.numpy as jnp

    from jaxllm.layers.base import Context

    model, params = engines.model_and_params()
    row = jnp.pad(jnp.asarray([ids]), ((0, 0), (0, engines.LENGTH - len(ids))))
    logits = model.apply({"params": params}, Context.whole(row))[1].logits[0, :, :258]
    law = jax.nn.log_softmax(logits)
    return [None, *(float(law[i - 1, ids[i]]) for i in range(1, len(ids))), 0.0]


def test_a_stop_text_split_over_tokens_never_reaches_the_client(client):
    asked = {"model": "tiny", "prompt": "x", "max_tokens": 8, "temperature": 0, "logit_bias": {"90": 100}}
    assert client.completions.create(**asked).choices[0].text == "Z" * 8
    stopped = client.completions.create(**asked, stop=["ZZZ"])
    assert (
        stopped.choices[0].text == ""
        and stopped.choices[0].finish_reason == "stop"
        and stopped.usage.completion_tokens == 3
    )
    pieces = [c.choices[0].text for c in client.completions.create(**asked, stop=["ZZZ"], stream=True)]
    assert "".join(pieces) == ""


def test_models_health_metrics_and_tokens(running, client):
    assert [m.id for m in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").id == "tiny"
    assert httpx.get(running.url + "/health").json() == {"status": "ok"}
    ids = post(running, "/tokenize", json={"prompt": "héllo"}).json()["tokens"]
    assert post(running, "/detokenize", json={"tokens": ids}).json() == {"prompt": "héllo"}
    page = httpx.get(running.url + "/metrics").text
    for name in (
        "num_requests_running",
        "kv_cache_usage_perc",
        "generation_tokens_total",
        "time_to_first_token_seconds_count",
    ):
        assert f'jaxllm_{name}{{model_name="tiny"}}' in page
    assert "vllm:" not in page
    chat = httpx.get(running.url + "/")
    assert "default-src 'none'" in chat.headers["content-security-policy"] and "/v1/chat/completions" in chat.text
    assert httpx.get(running.url + "/health", headers={"x-request-id": "abc-1"}).headers["x-request-id"] == "abc-1"
    assert httpx.get(running.url + "/health", headers={"x-request-id": "a b<script>"}).headers["x-request-id"].isalnum()


PROBE = """<img src="/hold"><script>(async () => {
  const until = async f => { while (!f()) await new Promise(r => setTimeout(r, 20)); };
  $('mode').value = 'completion'; $('max_tokens').value = 7; $('seed').value = 5;
  $('text').value = 'hello'; $('form').requestSubmit();
  await until(() => document.querySelector('.assistant')?.dataset.done && $('numbers').textContent.includes('held'));
  $('text').value = 'x'.repeat(200); $('form').requestSubmit();
  await until(() => document.querySelector('.error') && $('model').textContent !== 'jaxllm');
  const texts = [...document.querySelectorAll('.turn'), $('numbers'), $('model')].map(e => e.textContent);
  await fetch('/done', {method: 'POST', body: JSON.stringify(texts)});
})()</script></body>"""


def test_the_chat_page_in_a_browser(running, client, tmp_path):
    """It streams an answer, shows times and the cache in use, and a refusal in words. An image that is not there before the script has
    said what it saw keeps the browser waiting."""
    page, told = httpx.get(running.url + "/").text.replace("</body>", PROBE), []

    async def done(request):
        told.append(await request.json())
        return Response()

    async def hold(request):
        end = time.monotonic() + 60
        while not told and time.monotonic() < end:
            await asyncio.sleep(0.05)
        return Response()

    routes = running.server.app.router.routes
    more = [
        Route("/probed", lambda request: HTMLResponse(page)),
        Route("/hold", hold),
        Route("/done", done, methods=["POST"]),
    ]
    routes.extend(more)
    try:
        chromium("--dump-dom", running.url + "/probed", folder=tmp_path)
    finally:
        del routes[-len(more) :]
    (question, answer, _, refused, numbers, model), *_ = told
    asked = {"model": "tiny", "prompt": "hello", "max_tokens": 7, "seed": 5, "temperature": 0.7}
    assert question == "hello" and answer == client.completions.create(**asked).choices[0].text
    assert re.search(r"first token \d+ ms, (\d|-).* a token, \d+ tokens, cache .* % held", numbers), numbers
    assert "do not fit the longest sequence" in refused and model == "tiny"


# --- mistakes ----------------------------------------------------------------------------------------------------------------------

GOOD = {"model": "tiny", "prompt": "a", "max_tokens": 1}
MISTAKES = [
    ({"model": "other"}, 404, "model"),
    ({"prompt": ""}, 400, "prompt"),
    ({"prompt": []}, 400, "prompt"),
    ({"prompt": None}, 400, "prompt"),
    ({"prompt": [[]]}, 400, "prompt"),
    ({"prompt": [1, "a"]}, 400, "prompt"),
    ({"prompt": [999]}, 400, "prompt"),
    ({"prompt": [-1]}, 400, "prompt"),
    ({"prompt": "a" * 70}, 400, "prompt"),
    ({"max_tokens": 64}, 400, "prompt"),
    ({"max_tokens": 0}, 400, "max_tokens"),
    ({"max_tokens": "5"}, 400, "max_tokens"),
    ({"max_tokens": 2**70}, 400, "max_tokens"),
    ({"temperature": -0.1}, 400, "temperature"),
    ({"temperature": True}, 400, "temperature"),
    ({"top_p": 0}, 400, "top_p"),
    ({"top_p": 1.1}, 400, "top_p"),
    ({"n": 0}, 400, "n"),
    ({"n": 1000}, 400, "n"),
    ({"stop": [""]}, 400, "stop"),
    ({"stop": ["a"] * 17}, 400, "stop"),
    ({"stop": {"a": 1}}, 400, "stop"),
    ({"logprobs": 21}, 400, "logprobs"),
    ({"logit_bias": {"x": 1}}, 400, "logit_bias"),
    ({"logit_bias": {"9999": 1}}, 400, "logit_bias"),
    ({"logit_bias": {"1": 101}}, 400, "logit_bias"),
    ({"stream": "yes"}, 400, "stream"),
    ({"stream_options": {"include_usage": True}}, 400, "stream_options"),
    ({"unknown_field": {"a": [1]}, "user": "somebody"}, 200, None),
]


@pytest.mark.parametrize(("change", "status", "param"), MISTAKES, ids=[json.dumps(m[0])[:40] for m in MISTAKES])
def test_a_mistake_is_a_status_and_a_line(running, change, status, param):
    for more in ({}, {"stream": True}):
        reply = post(running, "/v1/completions", json={**GOOD, **more, **change})
        if "stream_options" in change and more:
            continue
        assert reply.status_code == status, reply.text
        if status != 200:
            error = reply.json()["error"]
            assert set(error) == {"message", "type", "param", "code"} and error["param"] == param
            assert "\n" not in error["message"]


def test_bodies_that_are_no_requests(running):
    limit = running.server.settings.max_body
    for content, status in (
        (b"", 400),
        (b"{", 400),
        (b"[]", 400),
        (b"null", 400),
        (b'{"temperature": NaN}', 400),
        (b'{"a":' * 100_000, 400),
        (b'{"prompt": "\\ud800"}', 400),
        (b"\xff\xfe", 400),
        (b"x" * (limit + 1), 413),
    ):
        reply = post(running, "/v1/completions", content=content, headers={"content-type": "application/json"})
        assert reply.status_code == status, content[:20]
        assert reply.json()["error"]["message"]
    assert post(running, "/v1/completions", content=b"a=1", headers={"content-type": "text/plain"}).status_code == 415
    chunks = (b"x" * 2**16 for _ in range(100))
    assert (
        post(running, "/v1/completions", content=chunks, headers={"content-type": "application/json"}).status_code
        == 413
    )
    assert httpx.get(running.url + "/v1/completions").status_code == 405
    assert httpx.get(running.url + "/v1/nothing").json()["error"]["type"] == "not_found_error"
    for messages in (
        [],
        "hi",
        [{"role": "user"}],
        [{"content": "x"}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": "http://x"}]}],
    ):
        assert post(running, "/v1/chat/completions", json={"messages": messages}).status_code == 400


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
FIELDS = ["prompt", "messages", "max_tokens", "temperature", "top_p", "top_k", "min_p", "n", "stop", "seed", "logprobs", "echo",
          "logit_bias", "stream", "stream_options", "min_tokens", "presence_penalty", "stop_token_ids", "model", "cache_salt"]  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(body=st.dictionaries(st.sampled_from(FIELDS), json_values, max_size=4), chat=st.booleans())
def test_no_body_makes_the_server_fail(running, body, chat):
    path = "/v1/chat/completions" if chat else "/v1/completions"
    base = {"messages": [{"role": "user", "content": "a"}]} if chat else {"prompt": "a"}
    raw = json.dumps({**base, "max_tokens": 1, **body}).encode("utf-8", "replace")
    with httpx.stream(
        "POST", running.url + path, content=raw, headers={"content-type": "application/json"}, timeout=60
    ) as reply:
        assert reply.status_code in (200, 400, 404), reply.read()
        reply.read()


# --- comings and goings ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("queued", [False, True])
def test_a_client_that_goes_leaves_nothing_behind(running, monkeypatch, stream, queued):
    step = running.engine.step
    monkeypatch.setattr(running.engine, "step", lambda: (time.sleep(0.02), step())[1])  # so that it goes in the middle
    body = json.dumps({"prompt": "abcdef", "max_tokens": 50, "stream": stream, "ignore_eos": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    sockets = [socket.create_connection(("127.0.0.1", running.port)) for _ in range(8 if queued else 1)]
    for one in sockets:
        one.sendall(head.encode() + body)
    if stream:
        sockets[0].recv(300)
    else:
        time.sleep(0.15)
    assert running.engine.scheduler.running
    for one in sockets:
        one.close()
    assert running.idle(2.0)


def test_200_clients_at_once(running):
    """Slow readers, quitters and mistakes among them: every answer is its own, and nothing is lost."""

    async def all_of_them():
        limits = httpx.Limits(max_connections=200)
        async with httpx.AsyncClient(base_url=running.url, timeout=120, limits=limits) as http:
            return await asyncio.gather(*(one(http, i) for i in range(200)))

    async def one(http, i):
        body = {
            "prompt": "abc" + "d" * (i % 7),
            "max_tokens": 1 + i % 5,
            "seed": i % 10,
            "ignore_eos": True,
            "stream": i % 2 == 0,
        }
        if i % 20 == 3:
            return (await http.post("/v1/completions", json=body | {"temperature": -1})).status_code
        if i % 20 == 4:  # a quitter
            async with http.stream("POST", "/v1/completions", json=body) as reply:
                async for _ in reply.aiter_bytes():
                    return "quit"
        if body["stream"]:
            text = ""
            async with http.stream("POST", "/v1/completions", json=body) as reply:
                async for part in reply.aiter_text():
                    text += part
                    await asyncio.sleep(0.05 if i % 30 == 0 else 0)
            return i, "".join(e["choices"][0]["text"] for e in sse(text))
        reply = await http.post("/v1/completions", json=body)
        return i, reply.json()["choices"][0]["text"]

    results = asyncio.run(all_of_them())
    assert running.idle()
    same = {}
    for result in results:
        if isinstance(result, tuple):
            i, text = result
            same.setdefault((i % 7, i % 5, i % 10), set()).add(text)
        else:
            assert result in (400, "quit")
    assert all(len(texts) == 1 for texts in same.values())


def test_a_failed_step_is_a_500_and_the_server_goes_on(running, client, monkeypatch):
    draw = running.engine.runner.draw

    def broken(*args):
        monkeypatch.undo()
        draw(*args)
        raise RuntimeError("the device is gone")

    monkeypatch.setattr(running.engine.runner, "draw", broken)
    reply = post(running, "/v1/completions", json=GOOD)
    assert reply.status_code == 500 and "the device is gone" in reply.json()["error"]["message"]
    assert client.completions.create(**GOOD).usage.completion_tokens == 1
    monkeypatch.setattr(running.engine.runner, "draw", broken)
    events = sse(post(running, "/v1/completions", json={**GOOD, "stream": True, "max_tokens": 5}).text)
    assert "error" in events[-1]


def test_an_engine_that_died_is_unhealthy_and_nobody_waits(running, monkeypatch):
    service = Service(running.engine)
    service.start()

    def dead():
        raise KeyboardInterrupt

    async def ask():
        async for _ in service.stream("abc", GREEDY._replace(max_tokens=2)):
            pass

    running_step = running.engine.step
    monkeypatch.setattr(running.engine, "step", dead)
    running.service.close()  # its thread must not take the steps
    with pytest.raises(Exception, match="the engine has stopped"):
        asyncio.run(ask())
    assert not service.healthy
    monkeypatch.setattr(running.engine, "step", running_step)
    while running.engine.busy:
        running.engine.step()
    running.service = Service(running.engine, running.server.metrics.observe)
    running.server.service = running.server.metrics.service = running.service
    running.service.start()


def test_keys_guard_everything_but_health_and_the_page():
    server = Running(keys=[KEY], vllm_metrics=True)
    try:
        for method, path in (
            ("GET", "/v1/models"),
            ("GET", "/metrics"),
            ("POST", "/v1/completions"),
            ("POST", "/tokenize"),
            ("POST", "/detokenize"),
            ("POST", "/v1/chat/completions"),
            ("GET", "/v1/models/tiny"),
        ):
            for headers in (
                {},
                {"authorization": "Bearer wrong"},
                {"authorization": f"Basic {KEY}"},
                {"authorization": "Bearer \xff"},
            ):
                assert (
                    httpx.request(
                        method, server.url + path, headers={k: v.encode("latin-1") for k, v in headers.items()}
                    ).status_code
                    == 401
                )
        assert httpx.get(server.url + "/health").status_code == 200
        good = {"authorization": f"Bearer {KEY}"}
        assert httpx.get(server.url + "/v1/models", headers=good).status_code == 200
        page = httpx.get(server.url + "/metrics", headers=good).text
        assert "vllm:num_requests_running" in page and "jaxllm_num_requests_running" in page
        server.service.draining = True
        assert httpx.get(server.url + "/health").status_code == 503
        assert post(server, "/v1/completions", json=GOOD, headers=good).status_code == 503
    finally:
        server.close()


def test_too_many_waiting_are_told_when_to_come_back(running, monkeypatch):
    running.engine.arrange(queue=2)
    step = running.engine.step
    monkeypatch.setattr(running.engine, "step", lambda: (time.sleep(0.05), step())[1])
    body = {"prompt": "abc", "max_tokens": 10, "ignore_eos": True}
    with concurrent.futures.ThreadPoolExecutor(12) as pool:
        replies = list(pool.map(lambda _: post(running, "/v1/completions", json=body), range(12)))
    codes = {r.status_code for r in replies}
    assert codes == {200, 429}
    assert all(r.headers["retry-after"] for r in replies if r.status_code == 429)
    running.idle()
    engines.as_new(running.engine)


def test_a_deadline_ends_a_request(running, monkeypatch):
    import dataclasses

    step = running.engine.step
    monkeypatch.setattr(running.engine, "step", lambda: (time.sleep(0.05), step())[1])
    monkeypatch.setattr(running.server, "settings", dataclasses.replace(running.server.settings, deadline_s=0.2))
    reply = post(running, "/v1/completions", json={"prompt": "a", "max_tokens": 50, "ignore_eos": True})
    assert reply.status_code == 408
    assert running.idle(2.0)


def test_events_carry_where_they_start(running):
    """The engine may be ahead of whoever reads: an event must not look at what the request has become."""

    async def late():
        events: list[Event] = []
        async for event in running.service.stream("abc", GREEDY._replace(max_tokens=6, ignore_eos=True)):
            await asyncio.sleep(0.05)
            events.append(event)
        return events

    events = asyncio.run(late())
    assert [e.start for e in events] == list(range(6))
