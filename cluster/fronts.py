"""The router's ports: HTTP and gRPC on one event loop, bound before ready, drained together."""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import uvicorn
from fastapi import FastAPI

from cluster.plan import served_name
from core.config import ClusterConfig, RouterConfig
from core.errors import PreflightError
from router.rpc.server import RpcFront
from router.tls import read_tls, root_of

DRAIN_S = 2  # live streams get this long to end; uvicorn takes whole seconds


class _HttpServer(uvicorn.Server):
    """Leaves signals to whoever runs ``serve``."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def listen(
    config: RouterConfig,
    app: FastAPI,
    rpc: RpcFront | None,
    ready: Callable[[int, int | None], None],
    stop: asyncio.Event,
    end_streams: Callable[[], None] = lambda: None,
) -> None:
    """Serve until ``stop`` is set. ``ready`` gets the ports, of HTTP and of gRPC.

    ``end_streams`` is called first when stopping: it gives every open stream its reason.

    Raises PreflightError where a port is taken, ConfigError where a file of TLS is wrong.
    """
    tls = read_tls(config)
    sock = _http_socket(config)
    try:
        grpc_port = None if rpc is None else rpc.bind(config.host, config.grpc_port, tls)
    except PreflightError:
        sock.close()
        raise
    settings = uvicorn.Config(
        app,
        log_level="warning",
        log_config=None,  # its records go where ours go
        access_log=False,
        lifespan="off",
        timeout_graceful_shutdown=DRAIN_S,
        ssl_context_factory=None if tls is None else lambda *_: tls.context(),
    )
    server = _HttpServer(settings)
    async with asyncio.TaskGroup() as tasks:
        if rpc is not None:
            await rpc.start()
        tasks.create_task(server.serve(sockets=[sock]))
        ready(sock.getsockname()[1], grpc_port)
        await stop.wait()
        end_streams()
        server.should_exit = True
        if rpc is not None:
            await rpc.stop(DRAIN_S)


def stop_signals() -> asyncio.Event:
    """The event that SIGINT and SIGTERM set from now on."""
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    return stop


def _http_socket(config: RouterConfig) -> socket.socket:
    try:
        return socket.create_server((config.host, config.port))
    except OSError as error:
        raise PreflightError(
            f"cannot listen on {config.host}:{config.port}: {error.strerror};"
            " choose another with router.port=..."
        ) from error


def banner(config: ClusterConfig, port: int, grpc_port: int | None) -> str:
    """The ready line, and what to try next."""
    router = config.router
    url = f"http{'s' if router.tls_cert else ''}://{router.host}:{port}"
    grpc = "" if grpc_port is None else f", gRPC (antiphon.v1) on {router.host}:{grpc_port}"
    name = served_name(config)
    messages = '[{"role": "user", "content": "What is the capital of France?"}]'
    access = _access(router)
    return f"""ready: {name} on {url}{grpc}

  curl{access.curl} {url}/v1/chat/completions -H 'content-type: application/json' \\
    -d '{{"model": "{name}", "messages": {messages},
         "temperature": 0, "max_tokens": 64}}'

  from openai import OpenAI
  client = OpenAI(base_url="{url}/v1", api_key="{access.key}")
  messages = {messages}
  answer = client.chat.completions.create(
      model="{name}", messages=messages, temperature=0, max_tokens=64
  )
  print(answer.choices[0].message.content)

  antiphon status --url {url}{access.command}
{access.notes}  Ctrl-C stops everything."""


class _Access(NamedTuple):
    """What a client needs besides the address, as each shows it."""

    curl: str
    command: str
    key: str
    notes: str


def _access(config: RouterConfig) -> _Access:
    """Names stand for keys: the banner may be logged."""
    curl = command = notes = ""
    if config.tls_cert:
        ca = root_of(config) or "CA.pem"
        curl, command = f" --cacert {ca}", f" --ca {ca}"
        notes = f"  Python believes the certificate with the variable SSL_CERT_FILE={ca}\n"
        if ca == "CA.pem":
            notes += (
                f"  CA.pem: the certificate of whoever signed {config.tls_cert};"
                " leave it out where that is a public authority\n"
            )
    if config.api_keys:
        curl += " -H 'authorization: Bearer KEY'"
        command += " --key KEY"
    return _Access(curl, command, "KEY" if config.api_keys else "none", notes)
