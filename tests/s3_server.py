"""An S3 server in a process of its own (moto's, over HTTP), and a proxy that goes wrong as networks and stores do.

`python s3_server.py` serves on a free port of loopback and says which.
"""

from __future__ import annotations

import contextlib
import http.client
import io
import re
import socket
import struct
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from draftline.cluster.processes import ChildProcess
from leftovers import wait_for

BUCKET = "draftline-tests"
ACCESS_KEY = "AKIATESTTESTTESTTEST"
SECRET_KEY = "the-secret-that-nobody-may-print"

_SAYS = "S3 server on port "


@contextlib.contextmanager
def s3_server(folder: Path) -> Iterator[str]:
    """The endpoint's URL of a server with one empty bucket, `BUCKET`; its log lies in `folder`."""
    log = folder / "s3_server.log"
    with ChildProcess([sys.executable, __file__], log_file=log):
        found = re.search(rf"{_SAYS}(\d+)\n", wait_for(log, "started"))
        assert found is not None
        yield f"http://127.0.0.1:{found[1]}"


def s3_environment(endpoint: str) -> dict[str, str | None]:
    """The environment of whoever uses the server; None: not set."""
    return {
        "AWS_ENDPOINT_URL_S3": endpoint,
        "AWS_ACCESS_KEY_ID": ACCESS_KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_CONFIG_FILE": "/nonexistent",
        "AWS_SHARED_CREDENTIALS_FILE": "/nonexistent",
        "AWS_ENDPOINT_URL": None,
        "AWS_REGION": None,
        "AWS_PROFILE": None,
        "AWS_SESSION_TOKEN": None,
    }


@dataclass
class Fault:
    """What becomes of the next `times` requests whose method and path match: one of the four."""

    method: str = "*"
    path: str = ""
    times: int = 10**9
    code: str = ""
    status: int = 0
    reset: bool = False
    truncate: bool = False
    slow_s: float = 0.0
    lose_answer: bool = False
    hits: int = field(default=0, init=False)

    def takes(self, method: str, path: str) -> bool:
        if self.hits >= self.times or self.method not in ("*", method) or self.path not in path:
            return False
        self.hits += 1
        return True


class FaultyProxy:
    """Hands requests on to a server over HTTP; `faults` says which of them go wrong, and how."""

    def __init__(self, upstream: str) -> None:
        self.faults: list[Fault] = []
        self.requests: list[str] = []
        self._lock = threading.Lock()
        proxy, host = self, urlsplit(upstream).netloc

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def _handle(self) -> None:
                self.close_connection = True
                length = int(self.headers.get("Content-Length") or 0)
                if len(body := self.rfile.read(length)) < length:
                    return  # the client gave up half-way
                fault = proxy.fault_for(self.command, self.path)
                time.sleep(fault.slow_s)
                if fault.reset:
                    return _reset(self.connection)
                if fault.status:
                    return self._send(fault.status, {"Content-Type": "application/xml"}, _error(fault.code))
                upstream = http.client.HTTPConnection(host, timeout=30)
                headers = {name: value for name, value in self.headers.items() if name.lower() != "expect"}
                upstream.request(self.command, self.path, body, headers)
                answer = upstream.getresponse()
                data = answer.read()
                upstream.close()
                if fault.lose_answer:
                    return _reset(self.connection)
                kept = {name: value for name, value in answer.getheaders() if name.lower() not in _HOP}
                if self.command == "HEAD":
                    kept["Content-Length"] = answer.getheader("Content-Length") or "0"
                self._send(answer.status, kept, data, half=fault.truncate)

            def _send(self, status: int, headers: dict[str, str], data: bytes, half: bool = False) -> None:
                self.send_response_only(status)
                for name, value in ({"Content-Length": str(len(data))} | headers | {"Connection": "close"}).items():
                    self.send_header(name, value)
                self.end_headers()
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # a client that no longer waits
                    self.wfile.write(data[: len(data) // 2] if half else data)

            do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = _handle

            def log_message(self, *_values: Any) -> None:
                """Quiet."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()

    def fault_for(self, method: str, path: str) -> Fault:
        with self._lock:
            self.requests.append(f"{method} {path}")
            return next((fault for fault in self.faults if fault.takes(method, path)), Fault())

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


_HOP = {"connection", "content-length", "transfer-encoding", "server", "date"}


def _error(code: str) -> bytes:
    return f'<?xml version="1.0"?><Error><Code>{code}</Code><Message>{SECRET_KEY}</Message></Error>'.encode()


def _reset(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.shutdown(socket.SHUT_RD)
    connection.close()


def _serve() -> None:
    import logging

    from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
    from moto.s3.models import s3_backends
    from werkzeug.serving import make_server

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    moto, one_at_a_time = DomainDispatcherApplication(create_backend_app), threading.Lock()

    def app(environ: Any, start_response: Any) -> Any:
        length = -1 if environ.get("wsgi.input_terminated") else int(environ.get("CONTENT_LENGTH") or 0)
        environ["wsgi.input"] = io.BytesIO(environ["wsgi.input"].read(length))  # a slow client must not hold the lock
        with one_at_a_time:  # moto compares and writes in two steps; S3 does it in one
            return moto(environ, start_response)

    s3_backends["123456789012"]["aws"].create_bucket(BUCKET, "us-east-1")
    server = make_server("127.0.0.1", 0, app, threaded=True)
    print(f"{_SAYS}{server.server_port}\nstarted", flush=True)
    server.serve_forever()


if __name__ == "__main__":
    _serve()
