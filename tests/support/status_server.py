"""A local HTTPS server that answers as Kubeflow Trainer's status server does, and stores posts."""

from __future__ import annotations

import json
import shutil
import ssl
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

PATH = "/apis/trainer.kubeflow.org/v1alpha1/namespaces/ml/trainjobs/mine/status"


def has_openssl() -> bool:
    """Return True if a certificate can be made."""
    return shutil.which("openssl") is not None


@dataclass
class StatusServer:
    """Server that accepts ``tokens``; ``posts`` are all (token, body), also refused ones."""

    home: Path
    port: int = 0
    tokens: set[str] = field(default_factory=lambda: {"first"})
    posts: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    came: threading.Condition = field(default_factory=threading.Condition)

    @property
    def environ(self) -> dict[str, str]:
        """Environment that the controller gives a pod."""
        name = "KUBEFLOW_TRAINER_SERVER_"
        return {
            f"{name}URL": f"https://localhost:{self.port}{PATH}",
            f"{name}CA_CERT": str(self.home / "ca.crt"),
            f"{name}TOKEN": str(self.home / "token"),
        }

    @property
    def taken(self) -> list[dict[str, Any]]:
        """Bodies of accepted posts."""
        return [body for token, body in self.posts if token in self.tokens]

    def wait_for(self, count: int) -> None:
        """Wait until ``count`` posts have arrived."""
        with self.came:
            assert self.came.wait_for(lambda: len(self.posts) >= count, timeout=60.0), self.posts


@contextmanager
def status_server(home: Path) -> Iterator[StatusServer]:
    """Run the server on a free port, with a certificate of its own authority and a token file."""
    subprocess.run(
        [
            "openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2",
            "-keyout", str(home / "key.pem"), "-out", str(home / "ca.crt"),
            "-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost",
        ],
        check=True, capture_output=True,
    )  # fmt: skip
    (home / "token").write_text("first\n")
    status_server = StatusServer(home)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            data = self.rfile.read(int(self.headers["Content-Length"]))
            token = self.headers["Authorization"].removeprefix("Bearer ")
            is_right = self.path == PATH and token in status_server.tokens
            answer = {"kind": "Status", "message": "Forbidden"}
            self.send_response(200 if is_right else 403)
            self.end_headers()
            self.wfile.write(data if is_right else json.dumps(answer).encode())
            with status_server.came:
                status_server.posts.append((token, json.loads(data)))
                status_server.came.notify_all()

        def log_message(self, format: str, *args: object) -> None:
            """Keep requests out of the tests' log."""

    server = ThreadingHTTPServer(("localhost", 0), Handler)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(home / "ca.crt", home / "key.pem")
    server.socket = context.wrap_socket(server.socket, server_side=True)
    status_server.port = server.server_address[1]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield status_server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
