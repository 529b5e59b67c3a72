"""A stand-in for the model hub: an HTTP server on loopback with the endpoints a download uses."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

COMMIT = "0123456789abcdef0123456789abcdef01234567"

Models = dict[str, dict[str, bytes]]  # name -> file -> content


class HubServer(ThreadingHTTPServer):
    """Serves ``models`` and notes every request in ``asked`` ("GET /path")."""

    def __init__(self, models: Models) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.models = models
        self.asked: list[str] = []


@contextmanager
def serve_hub(models: Models) -> Iterator[tuple[str, list[str]]]:
    """Run a hub; yields its endpoint and the list of requests, which grows."""
    server = HubServer(models)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", server.asked
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    server: HubServer

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base's name
        """Keep the test's output clean."""

    def _answer(self, *, with_body: bool) -> None:
        path = self.path.partition("?")[0]
        self.server.asked.append(f"{self.command} {path}")
        status, body, headers = _look_up(self.server.models, path)
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if with_body:
            self.wfile.write(body)


def _look_up(models: Models, path: str) -> tuple[int, bytes, dict[str, str]]:
    """Status, body and headers of one request."""
    for name, files in models.items():
        if path.startswith(f"/api/models/{name}/"):
            return 200, _listing(name, files, tree="/tree/" in path), {}
        body = files.get(path.removeprefix(f"/{name}/resolve/{COMMIT}/"))
        if body is not None:
            etag = f'"{hashlib.sha256(body).hexdigest()}"'
            return 200, body, {"ETag": etag, "X-Repo-Commit": COMMIT}
    return 404, b"", {"X-Error-Code": "RepoNotFound"}


def _listing(name: str, files: dict[str, bytes], *, tree: bool) -> bytes:
    if tree:
        rows = [
            {"type": "file", "path": f, "size": len(b), "oid": hashlib.sha1(b).hexdigest()}
            for f, b in files.items()
        ]
        return json.dumps(rows).encode()
    siblings = [{"rfilename": file} for file in files]
    return json.dumps({"id": name, "sha": COMMIT, "siblings": siblings}).encode()
