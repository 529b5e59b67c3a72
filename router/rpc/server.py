"""The gRPC front: antiphon.v1, health and reflection on one port, on the router's event loop."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import msgspec
from grpc_health.v1 import health, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from core.errors import PreflightError
from router.frontdoor import FrontDoor
from router.keys import Keys
from router.readiness import Readiness
from router.rpc.gen import antiphon_pb2, antiphon_pb2_grpc
from router.rpc.guard import Guard
from router.rpc.health import Health
from router.rpc.service import AntiphonService, Members
from router.tls import Tls

SERVICE = antiphon_pb2.DESCRIPTOR.services_by_name["Antiphon"].full_name


class RpcServices(msgspec.Struct, frozen=True, kw_only=True):
    """What the gRPC front asks of the rest of the system."""

    door: FrontDoor
    ready: Callable[[], Awaitable[Readiness]]
    members: Members
    body_limit_mib: int = 16  # a larger request gets RESOURCE_EXHAUSTED
    keys: Keys = msgspec.field(default_factory=Keys)


class RpcFront:
    """Made, bound, started and stopped on one event loop."""

    def __init__(self, services: RpcServices) -> None:
        self._server = grpc.aio.server(
            interceptors=(Guard(services.keys),), options=_options(services.body_limit_mib)
        )
        self._health = Health(services.ready, (SERVICE,))
        service = AntiphonService(services.door, services.members, services.keys)
        antiphon_pb2_grpc.add_AntiphonServicer_to_server(service, self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        names = (SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self._server)

    def bind(self, host: str, port: int, tls: Tls | None = None) -> int:
        """Take a port (0: any free one) and return it. Raises PreflightError."""
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        try:
            bound: int = (
                self._server.add_insecure_port(address)
                if tls is None
                else self._server.add_secure_port(address, _credentials(tls))
            )
        except RuntimeError as error:
            raise PreflightError(
                f"cannot listen on {address} for gRPC: choose another with router.grpc_port=..., "
                "or switch it off with router.grpc=false"
            ) from error
        return bound

    async def start(self) -> None:
        """Serve on the bound port."""
        await self._health.start()
        await self._server.start()

    async def stop(self, grace_s: float) -> None:
        """Take no more calls; those that run are cancelled after the grace."""
        await self._health.stop()
        await self._server.stop(grace_s)


def _credentials(tls: Tls) -> Any:  # opaque: grpc.ServerCredentials
    wants_client = tls.client_ca is not None
    return grpc.ssl_server_credentials([(tls.key, tls.cert)], tls.client_ca, wants_client)


def _options(body_limit_mib: int) -> tuple[tuple[str, int], ...]:
    return (
        ("grpc.max_receive_message_length", body_limit_mib * 2**20),
        ("grpc.so_reuseport", 0),  # two routers on one port would share its connections
        # clients may ping an idle connection as often as every 10 s
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    )
