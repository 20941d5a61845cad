"""A proxy in front of an object store that injects faults: errors, resets, short bodies, silence, lost answers.

with FaultyProxy(address) as proxy:
    proxy.inject(Fault("status", status=503, times=2, method="GET"))
    ...
    assert proxy.count("GET") == 3
"""

import http
import http.client
import re
import socket
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

KINDS = ("status", "reset", "truncate", "short", "long", "slow", "lost answer", "away", "lag")


@dataclass
class Fault:
    """What happens to requests that match, `times` times (-1: always).

    status: the answer has this status and the body of S3's errors, with a `code`. reset: the connection is reset in
    the middle of the body. truncate: it is closed there. short, long: the body of a range or listing is whole but
    shorter or longer than asked for, and says so. slow: the first byte comes after `seconds`. lost answer: the
    request is carried out, and the connection closed. away: the connection is closed at once. lag: a listing has no
    objects and no folders yet.
    """

    kind: str
    status: int = 503
    code: str = "SlowDown"
    times: int = 1
    method: str = ""
    path: str = ""  # part of the request's path
    seconds: float = 0.0
    matches: Callable[[str, str], bool] = field(default=lambda method, path: True)
    hits: int = 0

    def __post_init__(self):
        assert self.kind in KINDS


class FaultyProxy:
    """The proxy; `address` is where clients connect."""

    def __init__(self, upstream, delay_s=0.0, handler=None):
        self.upstream, self.delay_s = urlsplit(upstream), delay_s
        self.requests, self.active, self.most_active = [], 0, 0
        self._faults, self._lock = [], threading.Lock()
        handler = type("Handler", (handler or Handler,), {"proxy": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._server.daemon_threads = True
        self.address = f"http://127.0.0.1:{self._server.server_port}"

    def inject(self, fault):
        with self._lock:
            self._faults.append(fault)
        return fault

    def stop(self, fault):
        """End a fault; it still counts what it has hit."""
        with self._lock:
            fault.times = fault.hits

    def clear(self):
        with self._lock:
            self._faults.clear()

    def count(self, method="", path=""):
        return sum(method in (m, "") and path in p for m, p in self.requests)

    def take_fault(self, method, path):
        with self._lock:
            self.requests.append((method, path))
            for fault in self._faults:
                if fault.hits == fault.times or fault.method not in ("", method) or fault.path not in path:
                    continue
                if fault.matches(method, path):
                    fault.hits += 1
                    return fault
        return None

    def __enter__(self):
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *_):
        self._server.shutdown()
        self._server.server_close()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    proxy: FaultyProxy

    def log_message(self, *_):
        pass

    def handle(self):
        try:
            super().handle()
        except OSError:  # the client is gone
            self.close_connection = True

    def handle_method(self):
        proxy, body = self.proxy, self._read_body()
        fault = proxy.take_fault(self.command, self.path)
        time.sleep(proxy.delay_s)
        kind = fault.kind if fault else ""
        if kind == "away":
            return self._drop()
        if kind == "slow":
            time.sleep(fault.seconds)
        if kind == "status":
            text = f"<Error><Code>{fault.code}</Code><Message>injected</Message></Error>".encode()
            return self._answer(fault.status, {"Content-Type": "application/xml"}, text)
        status, headers, content = self._forward(body)
        if kind == "lost answer":
            return self._drop()
        if kind in ("reset", "truncate"):
            self._answer(status, headers, content[: len(content) // 2], length=len(content))
            return self._drop(reset=kind == "reset")
        has_known_length = status == http.HTTPStatus.PARTIAL_CONTENT or "list-type=" in self.path
        if kind == "short" and has_known_length:
            content = content[: len(content) // 2]
        if kind == "long" and has_known_length:
            content += bytes(100)
        if kind == "lag" and "list-type=" in self.path:
            content = re.sub(rb"<(Contents|CommonPrefixes)>.*?</\1>", b"", content, flags=re.DOTALL)
        return self._answer(status, headers, content)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = handle_method  # noqa: N815

    def _read_body(self):
        if "chunked" in self.headers.get("Transfer-Encoding", ""):
            body = b""
            while size := int(self.rfile.readline(), 16):
                body += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
            return body
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def _forward(self, body):
        connection = http.client.HTTPConnection(self.proxy.upstream.netloc, timeout=60)
        headers = {k: v for k, v in self.headers.items() if k.lower() not in ("connection", "transfer-encoding")}
        headers.setdefault("Authorization", "AWS test:test")  # lets a plain client read, as from a web server
        connection.request(self.command, self.path, body or None, headers)
        response = connection.getresponse()
        content = response.read()
        answer = {k: v for k, v in response.getheaders() if k.lower() not in ("connection", "transfer-encoding")}
        connection.close()
        return response.status, answer, content

    def _answer(self, status, headers, content, length=None):
        self.send_response_only(status)
        for name, value in headers.items():
            if name.lower() != "content-length":
                self.send_header(name, value)
        declared = headers.get("Content-Length", "0") if self.command == "HEAD" else length or len(content)
        self.send_header("Content-Length", str(declared))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)
            self.wfile.flush()

    def _drop(self, reset=False):
        self.close_connection = True
        if reset:
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.connection.close()
        else:
            self.connection.shutdown(socket.SHUT_RDWR)
