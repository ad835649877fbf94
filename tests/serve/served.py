"""`meshwright serve` as it stands, in a process of its own, and a client that speaks to it over a socket."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection
from typing import Any
from urllib.parse import urlsplit

PATIENCE_S = 120.0
QUESTION: Mapping[str, Any] = {
    "model": "llama-3-8b",
    "cluster": "dgx-h100",
    "gpus": 16,
    "global_batch": 64,
    "seq_len": 4096,
    "robustness": False,
}


@dataclass(frozen=True)
class Reply:
    """What came back."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def document(self) -> Any:
        return json.loads(self.body)


@dataclass(frozen=True)
class Client:
    """Sends requests to the address that the command printed."""

    address: str

    @property
    def port(self) -> int:
        port = urlsplit(self.address).port
        assert port is not None
        return port

    @property
    def token(self) -> str:
        return urlsplit(self.address).path.strip("/")

    def send(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Reply:
        """A request whose path begins at the server's root, with just these headers beside the host's."""
        connection = HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_S)
        try:
            connection.request(method, path, body, dict(headers or {}))
            response = connection.getresponse()
            return Reply(response.status, dict(response.headers), response.read())
        finally:
            connection.close()

    def get(self, path: str) -> Reply:
        return self.send("GET", f"/{self.token}/{path}")

    def post(self, path: str, document: Any) -> Reply:
        body = document if isinstance(document, bytes) else json.dumps(document).encode()
        return self.send(
            "POST", f"/{self.token}/{path}", body, {"Content-Type": "application/json"}
        )

    def delete(self, path: str) -> Reply:
        return self.send("DELETE", f"/{self.token}/{path}")

    def ended(self, name: str) -> Any:
        """The ticket of a question once it is answered, or cannot be."""
        end = time.monotonic() + PATIENCE_S
        while True:
            ticket = self.get(f"answers/{name}").document
            if ticket["state"] not in ("waiting", "working"):
                return ticket
            assert time.monotonic() < end, ticket
            time.sleep(0.05)

    def ask(self, kind: str, **fields: Any) -> Any:
        """The ticket of a question that was taken and has ended."""
        reply = self.post(f"ask/{kind}", fields)
        assert reply.status == 202, reply.body
        return self.ended(reply.document["id"])


@contextmanager
def served(*options: str) -> Iterator[Client]:
    """The command at work; it ends by an interrupt, with all of its processes."""
    command = [sys.executable, "-m", "meshwright.cli", "serve", "--json", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ) as process:
        try:
            assert process.stdout is not None
            yield Client(json.loads(process.stdout.readline())["address"])
        finally:
            process.send_signal(signal.SIGINT)
            assert process.wait(timeout=PATIENCE_S) == 130
