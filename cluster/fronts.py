"""The router's ports: HTTP and gRPC on one event loop, bound before ready, drained together."""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import uvicorn
from fastapi import FastAPI

from cluster.plan import served_name
from core.config import ClusterConfig, RouterConfig
from core.errors import PreflightError
from router.rpc.server import RpcFront
from router.tls import read_tls

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
    host = config.router.host
    url = f"http{'s' if config.router.tls_cert else ''}://{host}:{port}"
    grpc = "" if grpc_port is None else f", gRPC (antiphon.v1) on {host}:{grpc_port}"
    name = served_name(config)
    messages = '[{"role": "user", "content": "What is the capital of France?"}]'
    header = " -H 'authorization: Bearer KEY'" if config.router.api_keys else ""
    key = "KEY" if config.router.api_keys else "none"
    return f"""ready: {name} on {url}{grpc}

  curl {url}/v1/chat/completions -H 'content-type: application/json'{header} \\
    -d '{{"model": "{name}", "messages": {messages}}}'

  from openai import OpenAI
  client = OpenAI(base_url="{url}/v1", api_key="{key}")
  answer = client.chat.completions.create(model="{name}", messages={messages})
  print(answer.choices[0].message.content)

  antiphon status --url {url}
  Ctrl-C stops everything."""
