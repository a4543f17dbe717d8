"""A proxy on loopback in front of an S3 server, where everything goes wrong that can, as often as asked for;
it counts what passes.

Requests are lost before they arrive, replies after the request was carried out; both are delayed; 503 and 429
are answered in the server's place; `Range` is ignored; bodies end early; a PUT arrives only after its sender
has given up.
"""

from __future__ import annotations

import http.client
import random
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

__all__ = ["FaultProxy", "Faults", "Passed"]

HOP_BY_HOP = frozenset({"connection", "keep-alive", "transfer-encoding", "content-length"})


@dataclass(frozen=True, slots=True)
class Faults:
    """How likely each fault is, per request; at most one of them happens to a request.

    Attributes:
        lost_request: The connection is closed, and the server never hears of it.
        lost_reply: The server does it, and the connection is closed.
        delay: The request is held back for up to `delay_seconds`, then served.
        unavailable: 503, with Retry-After.
        too_many: 429, with Retry-After.
        no_range: A range is asked for, and all is given.
        truncated: Half of the reply's body comes.
        late: A PUT is taken, not answered, and delivered `late_seconds` after.
        delay_seconds: At most.
        late_seconds: How much later: longer than the client waits.
    """

    lost_request: float = 0.0
    lost_reply: float = 0.0
    delay: float = 0.0
    unavailable: float = 0.0
    too_many: float = 0.0
    no_range: float = 0.0
    truncated: float = 0.0
    late: float = 0.0
    delay_seconds: float = 0.1
    late_seconds: float = 0.8

    @classmethod
    def all(cls) -> Faults:
        """Everything at once: a tenth of requests and a fifth of replies are lost, and so on."""
        return cls(
            lost_request=0.10, lost_reply=0.20, delay=0.05, unavailable=0.03, too_many=0.03, no_range=0.03,
            truncated=0.04, late=0.02,
        )  # fmt: skip

    def choose(self, number: float) -> str | None:
        """The fault for a random number from 0 to 1."""
        for entry in fields(self)[:8]:
            number -= getattr(self, entry.name)
            if number < 0:
                return entry.name
        return None


@dataclass(frozen=True, slots=True)
class Passed:
    """A request that the server was handed: method, key (with the query's operation), bytes both ways."""

    method: str
    path: str
    sent: int
    received: int
    status: int


@dataclass(slots=True)
class _Shared:
    host: str
    port: int
    faults: Faults
    random: random.Random
    whole: Callable[[str], bytes] | None
    overwrite: Callable[[str, bytes], object] | None
    only: Callable[[str, str], bool]
    lock: threading.Lock = field(default_factory=threading.Lock)
    counts: Counter[str] = field(default_factory=Counter)
    passed: list[Passed] = field(default_factory=list)
    late: list[threading.Thread] = field(default_factory=list)


class FaultProxy:
    """The proxy, as a context manager; `endpoint` is its URL.

    Args:
        upstream: The server's URL.
        faults: What goes wrong; may be changed while it runs.
        seed: For the dice.
        whole: Gets an object's path and gives all of it, for ranges that are ignored: without `Range` the
            client's signature would not fit.
        overwrite: Puts an object, given its path and bytes: then `If-None-Match` is ignored.
        only: Which requests faults happen to, by method and path.
    """

    def __init__(
        self,
        upstream: str,
        faults: Faults | None = None,
        *,
        seed: int = 0,
        whole: Callable[[str], bytes] | None = None,
        overwrite: Callable[[str, bytes], object] | None = None,
        only: Callable[[str, str], bool] = lambda method, path: True,
    ) -> None:
        parts = urlsplit(upstream)
        assert parts.hostname
        assert parts.port
        self._shared = _Shared(
            host=parts.hostname,
            port=parts.port,
            faults=faults or Faults(),
            random=random.Random(seed),
            whole=whole,
            overwrite=overwrite,
            only=only,
        )
        handler = type("Handler", (_Handler,), {"shared": self._shared})
        self._server = QuietServer(("127.0.0.1", 0), handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    @property
    def faults(self) -> Faults:
        return self._shared.faults

    @faults.setter
    def faults(self, faults: Faults) -> None:
        self._shared.faults = faults

    @property
    def counts(self) -> Counter[str]:
        """How often each fault happened; `served` counts the rest."""
        with self._shared.lock:
            return Counter(self._shared.counts)

    def passed(self) -> list[Passed]:
        """What reached the server since the last call."""
        with self._shared.lock:
            passed, self._shared.passed = self._shared.passed, []
        return passed

    def settle(self) -> None:
        """Wait until all late PUTs have been delivered."""
        while True:
            with self._shared.lock:
                late = [thread for thread in self._shared.late if thread.is_alive()]
                self._shared.late = late
            if not late:
                return
            for thread in late:
                thread.join()

    def __enter__(self) -> FaultProxy:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.settle()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class QuietServer(ThreadingHTTPServer):
    """A server of tests, which says nothing where a client hangs up and waits for none at its end."""

    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = 1 << 16  # headers and body in one packet
    shared: _Shared
    timeout = 60

    def setup(self) -> None:
        super().setup()
        self.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._upstream: http.client.HTTPConnection | None = None

    def finish(self) -> None:
        if self._upstream is not None:
            self._upstream.close()
        super().finish()

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing is printed."""

    def _serve(self) -> None:
        shared = self.shared
        body = self.rfile.read(int(self.headers.get("content-length") or 0))
        with shared.lock:
            fault = shared.faults.choose(shared.random.random())
            share = shared.random.random()
            if not shared.only(self.command, self.path):
                fault = None
            can_ignore = self.command == "GET" and "range" in self.headers and shared.whole is not None
            if (fault == "late" and self.command != "PUT") or (fault == "no_range" and not can_ignore):
                fault = None
            shared.counts[fault or "served"] += 1
        if fault == "lost_request":
            return self._hang_up()
        if fault in ("unavailable", "too_many"):
            status = 503 if fault == "unavailable" else 429
            text = b"<Error><Code>SlowDown</Code></Error>"
            return self._reply(status, {"retry-after": "1", "content-type": "application/xml"}, text)
        if fault == "late":
            with shared.lock:
                headers = dict(self.headers)
                thread = threading.Thread(target=self._deliver_late, args=(headers, body), daemon=True)
                shared.late.append(thread)
            thread.start()
            time.sleep(shared.faults.late_seconds)  # the sender waits in vain
            return self._hang_up()
        if shared.overwrite is not None and "if-none-match" in self.headers:
            shared.overwrite(self.path, body)
            return self._reply(200, {"etag": '"x"'}, b"")
        if fault == "delay":
            time.sleep(share * shared.faults.delay_seconds)
        status, reply_headers, data = self._forward(dict(self.headers), body)
        if fault == "no_range" and status == 206:
            assert shared.whole is not None
            status, data = 200, shared.whole(self.path)
            reply_headers = {k: v for k, v in reply_headers.items() if k.lower() != "content-range"}
        if fault == "lost_reply":
            return self._hang_up()
        return self._reply(status, reply_headers, data, truncate=fault == "truncated" and len(data) > 1)

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = _serve  # noqa: N815 - the names that the server calls

    def _forward(self, headers: dict[str, str], body: bytes) -> tuple[int, dict[str, str], bytes]:
        for attempt in range(2):
            if self._upstream is None:
                self._upstream = http.client.HTTPConnection(self.shared.host, self.shared.port, timeout=60)
            try:
                return self._ask(self._upstream, headers, body)
            except (http.client.HTTPException, OSError):  # an idle connection that the server has closed
                self._upstream.close()
                self._upstream = None
                if attempt:
                    raise
        raise AssertionError

    def _ask(
        self, upstream: http.client.HTTPConnection, headers: dict[str, str], body: bytes
    ) -> tuple[int, dict[str, str], bytes]:
        upstream.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
        for name, value in headers.items():
            if name.lower() not in ("connection",):
                upstream.putheader(name, value)
        upstream.endheaders(body or None)
        reply = upstream.getresponse()
        data = reply.read()
        kept = {name: value for name, value in reply.getheaders() if name.lower() not in HOP_BY_HOP}
        if self.command == "HEAD":
            kept["content-length"] = reply.headers.get("content-length") or "0"
        with self.shared.lock:
            self.shared.passed.append(
                Passed(self.command, unquote(self.path), len(body), len(data), reply.status)
            )
        return reply.status, kept, data

    def _deliver_late(self, headers: dict[str, str], body: bytes) -> None:
        time.sleep(self.shared.faults.late_seconds)
        connection = http.client.HTTPConnection(self.shared.host, self.shared.port, timeout=60)
        try:
            self._ask(connection, headers, body)
        finally:
            connection.close()

    def _hang_up(self) -> None:
        self.close_connection = True
        self.connection.shutdown(socket.SHUT_RDWR)

    def _reply(self, status: int, headers: dict[str, str], data: bytes, *, truncate: bool = False) -> None:
        self.send_response_only(status)
        for name, value in headers.items():
            self.send_header(name, value)
        if self.command != "HEAD" and status not in (204, 304):
            self.send_header("content-length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data[: len(data) // 2] if truncate else data)
        self.wfile.flush()
        if truncate:
            self._hang_up()
