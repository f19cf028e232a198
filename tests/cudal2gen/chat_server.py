"""A server of the chat-completions protocol on the loopback, which answers by a script."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

# A step of a script: answers one request.
Step = Callable[["Handler"], None]


class Server(ThreadingHTTPServer):
    """Serves a script: step i answers request i. ``requests`` and ``keys`` have what clients sent, ``faults`` what was
    wrong in it."""

    daemon_threads = True

    def __init__(self, script: Sequence[Step], forever: bool) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.script, self.forever = list(script), forever
        self.requests: list[dict[str, Any]] = []
        self.keys: list[str] = []
        self.faults: list[str] = []

    @property
    def url(self) -> str:
        """The server's address for clients."""
        return f"http://127.0.0.1:{self.server_address[1]}/v1"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignores errors, since some tests hang up."""


class Handler(BaseHTTPRequestHandler):
    """Checks that a request follows the protocol, records it, and answers it by the script's next step."""

    server: Server
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        """Answers a request by the next step of the script, and notes it with its faults."""
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path != "/v1/chat/completions" or not {"model", "messages"} <= body.keys():
            self.server.faults.append(f"{self.path}: {sorted(body)}")
        roles = [message["role"] for message in body["messages"]]
        if roles[:2] != ["system", "user"] or any(set(message) != {"role", "content"} for message in body["messages"]):
            self.server.faults.append(f"roles {roles}")
        self.server.requests.append(body)
        self.server.keys.append(self.headers["Authorization"])
        index = len(self.server.requests) - 1
        if index >= len(self.server.script) and not self.server.forever:
            self.server.faults.append("asked more often than the script says")
            return reply(self, 500, {"error": {"message": "the script is over"}})
        return self.server.script[min(index, len(self.server.script) - 1)](self)

    def log_message(self, *_: Any) -> None:
        """Logs nothing."""


def reply(handler: Handler, status: int, body: Any, headers: Mapping[str, str] | None = None) -> None:
    """Sends a complete response with a JSON body, or with the bytes of ``body``."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    handler.send_response(status)
    handler.send_header("Content-Type", "application/json")
    handler.send_header("Content-Length", str(len(data)))
    for name, value in (headers or {}).items():
        handler.send_header(name, value)
    handler.end_headers()
    handler.wfile.write(data)


def completion(
    text: str | list[Any] | None, finish: str = "stop", usage: tuple[int, int] | None = (1000, 200), **extra: Any
) -> Any:
    """The body of a completion with this text. ``usage``: its prompt and completion tokens, None to leave them out.
    ``extra``: further fields of the message."""
    body = {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 1,
        "model": "scripted-1",
        "choices": [
            {"index": 0, "finish_reason": finish, "message": {"role": "assistant", "content": text} | extra},
        ],
    }
    if usage:
        tokens_in, tokens_out = usage
        usage_fields = {
            "prompt_tokens": tokens_in,
            "completion_tokens": tokens_out,
            "total_tokens": tokens_in + tokens_out,
        }
        body["usage"] = usage_fields
    return body


def says(text: str | list[Any] | None, **extra: Any) -> Step:
    """An answer with this text."""
    return lambda handler: reply(handler, 200, completion(text, **extra))


def proposes(*ideas: tuple[str, dict[str, Any]]) -> Step:
    """An answer with proposals, each a base record and the fields that it changes."""
    proposals = [
        {"base": base, "changes": changes, "why": f"idea {number}"} for number, (base, changes) in enumerate(ideas, 1)
    ]
    return says(json.dumps({"proposals": proposals}))


def fails(status: int, message: str = "no", kind: str = "server_error") -> Step:
    """An answer that is an error with this status."""
    return lambda handler: reply(handler, status, {"error": {"message": message, "type": kind}})


def limits(after: str) -> Step:
    """429 with a header Retry-After."""
    body = {"error": {"message": "slow down", "type": "rate_limit"}}
    return lambda handler: reply(handler, 429, body, {"Retry-After": after})


def sends(body: bytes) -> Step:
    """An answer with this body, which need not be JSON."""
    return lambda handler: reply(handler, 200, body)


def waits(seconds: float) -> Step:
    """An empty answer after this time."""

    def step(handler: Handler) -> None:
        time.sleep(seconds)
        reply(handler, 200, completion("{}"))

    return step


def dribbles(seconds: float) -> Step:
    """Sends headers at once, then a byte every few moments, so that no single read times out."""

    def step(handler: Handler) -> None:
        handler.send_response(200)
        handler.send_header("Content-Type", "application/json")
        handler.send_header("Content-Length", "100000")
        handler.end_headers()
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            handler.wfile.write(b" ")
            handler.wfile.flush()
            time.sleep(0.05)

    return step


def breaks_off(body: bytes) -> Step:
    """Sends headers that announce a longer body than this one, and closes the connection."""

    def step(handler: Handler) -> None:
        handler.send_response(200)
        handler.send_header("Content-Type", "application/json")
        handler.send_header("Content-Length", str(2 * len(body)))
        handler.end_headers()
        handler.wfile.write(body)
        handler.close_connection = True

    return step


def hangs_up(handler: Handler) -> None:
    """Closes the connection without an answer."""
    handler.close_connection = True


def floods(chunks: int = 64) -> Step:
    """Sends a body that is larger than any client should read."""

    def step(handler: Handler) -> None:
        handler.send_response(200)
        handler.send_header("Content-Type", "application/json")
        handler.send_header("Content-Length", str(chunks << 20))
        handler.end_headers()
        for _ in range(chunks):
            handler.wfile.write(b"x" * (1 << 20))

    return step


@contextmanager
def serve_script(*script: Step, forever: bool = False) -> Iterator[Server]:
    """Runs a script, a step per request, and repeats the last step if ``forever``. Raises faults of the client."""
    server = Server(script, forever)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
    assert server.faults == []
