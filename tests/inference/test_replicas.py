"""The balancer's configuration of docs/serving.md, run by nginx in front of two replicas that answer as the server does."""

import asyncio
import re
import shutil
import socket
import subprocess
import threading
import time
from pathlib import Path

import httpx
import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.responses import JSONResponse, StreamingResponse
from starlette.routing import Route

PAGE = Path(__file__).resolve().parents[2] / "docs" / "serving.md"
NGINX = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin:/usr/local/sbin")
pytestmark = pytest.mark.skipif(NGINX is None, reason="there is no nginx here")


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as one:
        return one.getsockname()[1]


class Replica:
    """Says who it is, streams a piece every 50 ms, and refuses new work while it drains, as `task=serve` does after SIGTERM."""

    def __init__(self, name):
        self.name, self.port, self.draining, self.served = name, free_port(), False, 0
        routes = [Route("/v1/models", self.models), Route("/v1/completions", self.complete, methods=["POST"])]
        config = uvicorn.Config(Starlette(routes=routes), port=self.port, log_config=None, log_level="error")
        self.http = uvicorn.Server(config)
        self.thread = threading.Thread(target=self.http.run, daemon=True)
        self.thread.start()
        while not self.http.started:
            time.sleep(0.01)

    async def models(self, request):
        return JSONResponse({"data": [{"id": self.name}]}, 503 if self.draining else 200)

    async def complete(self, request):
        if self.draining:
            return JSONResponse({"error": {"message": "the server is shutting down"}}, 503)
        self.served += 1

        async def pieces():
            for i in range(6):
                yield f"data: {self.name}{i}\n\n".encode()
                await asyncio.sleep(0.05)
            yield b"data: [DONE]\n\n"

        return StreamingResponse(pieces(), media_type="text/event-stream")

    def close(self):
        self.http.should_exit = True
        self.thread.join(10)


@pytest.fixture
def balanced(tmp_path):
    """(address of the balancer, its two replicas)."""
    (block,) = re.findall(r"```nginx\n(.*?)```", PAGE.read_text(), re.S)
    replicas, port = [Replica("a"), Replica("b")], free_port()
    for old, new in (
        ("8001", replicas[0].port),
        ("8002", replicas[1].port),
        ("listen 8000", f"listen 127.0.0.1:{port}"),
    ):
        assert block.count(old) == 1
        block = block.replace(old, str(new))
    kinds = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    places = "".join(f"{kind}_temp_path {tmp_path}/{kind};\n" for kind in kinds)
    (tmp_path / "nginx.conf").write_text(
        f"daemon off; master_process off; pid {tmp_path}/pid; error_log {tmp_path}/errors;\nevents {{}}\n"
        f"http {{ access_log off;\n{places}{block}}}\n"
    )
    process = subprocess.Popen([NGINX, "-c", str(tmp_path / "nginx.conf"), "-p", str(tmp_path)], stderr=subprocess.PIPE)
    url = f"http://127.0.0.1:{port}"
    try:
        for _ in range(100):
            try:
                httpx.get(url + "/v1/models")
                break
            except httpx.TransportError:
                assert process.poll() is None, process.stderr.read()
                time.sleep(0.05)
        yield url, replicas
    finally:
        process.terminate()
        process.wait(10)
        for replica in replicas:
            replica.close()


def stream(url):
    """Events, and when each came."""
    times, events = [], []
    with httpx.stream("POST", url + "/v1/completions", json={"prompt": "a"}, timeout=20) as reply:
        assert reply.status_code == 200, reply.read()
        for line in reply.iter_lines():
            if line:
                events.append(line.removeprefix("data: "))
                times.append(time.monotonic())
    assert events[-1] == "[DONE]"
    return events, times


def test_requests_go_where_fewest_run_and_streams_come_as_they_are_made(balanced):
    url, replicas = balanced
    results = []
    threads = [threading.Thread(target=lambda: results.append(stream(url))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 8 and {r.served for r in replicas} == {4}
    for events, times in results:
        assert len({event[0] for event in events[:-1]}) == 1  # one replica made all of it
        assert times[-1] - times[0] > 0.2  # nothing waited for the end


def test_a_replica_that_is_down_or_drains_costs_no_request(balanced):
    url, (one, other) = balanced
    one.draining = True
    assert [stream(url)[0][0] for _ in range(4)] == ["b0"] * 4
    one.draining = False
    one.close()
    assert [httpx.get(url + "/v1/models").json()["data"][0]["id"] for _ in range(4)] == ["b"] * 4
    assert [stream(url)[0][0] for _ in range(2)] == ["b0"] * 2 and other.served == 6
