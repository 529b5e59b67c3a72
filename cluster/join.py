"""Another router in front of the ranks of a running cluster.

It asks the cluster's own router who is there, and keeps sessions of its own to every rank. When
that router is gone it goes on with the ranks it knows.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import httpx
import msgspec

from cluster import model_store, preflight
from cluster.fronts import banner, listen, stop_signals
from cluster.plan import served_name
from cluster.routing import router
from cluster.tasks import task_group
from core.clock import RealClock
from core.config import ClusterConfig, ModelConfig
from core.errors import PreflightError
from core.trust import address, remedy, trusting
from router.replicas import Member, Replicas
from router.text.defaults import sampling_defaults
from router.text.request import ServedModel
from worker.architectures import read_spec

log = logging.getLogger(__name__)

POLL_S = 0.5

Say = Callable[[str], None]


class Announced(msgspec.Struct, frozen=True, kw_only=True):
    """GET /admin/members: what a router that joins has to know."""

    model: ModelConfig
    context_len: int
    members: tuple[Member, ...]


async def join(config: ClusterConfig, url: str, say: Say, *, key: str = "", ca: str = "") -> None:
    """Serve until SIGINT or SIGTERM; of ``config`` only ``router`` and ``tracing`` count.

    Raises OperatorError. ``key`` is shown to the router at ``url``; ``ca`` is the PEM file to
    believe it by.
    """
    if problems := preflight.port_problems(config):
        raise PreflightError("\n".join(problems))
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    async with httpx.AsyncClient(
        base_url=address(url, "--join"),
        headers=headers,
        verify=trusting(ca),
        timeout=5,
        trust_env=False,
    ) as client:
        try:
            announced = await _ask(client)
        except httpx.HTTPStatusError as error:
            raise PreflightError(
                f"{url} does not tell who is there ({error.response.status_code}): "
                "show it its admin key with --key or ANTIPHON_KEY"
            ) from error
        except (httpx.HTTPError, msgspec.DecodeError) as error:
            fix = remedy(url, error, "start one with `antiphon serve`")
            raise PreflightError(f"no antiphon router answers on {url} ({error}): {fix}") from error
        config = msgspec.structs.replace(config, model=announced.model)
        folder = model_store.resolve(config.model.source, say)
        spec = read_spec(folder)
        model = ServedModel(
            name=served_name(config),
            aliases=config.model.aliases,
            context_len=announced.context_len,
            vocab_size=spec.vocab,
            eos_token_ids=frozenset(spec.eos_token_ids),
            created=int(RealClock().epoch()),
            sampling=sampling_defaults(config.router, folder),
        )
        async with (
            router(config.router, model, folder, config.tracing) as parts,
            task_group() as tasks,
        ):
            parts.replicas.update(announced.members)
            follower = tasks.create_task(_follow(client, parts.replicas))
            await listen(
                config.router,
                parts.app,
                parts.rpc,
                lambda *ports: say(banner(config, *ports)),
                stop_signals(),
                parts.door.abort_all,
            )
            follower.cancel()


async def _follow(client: httpx.AsyncClient, replicas: Replicas) -> None:
    """Keep the members up to date until cancelled."""
    lost = False
    while True:
        await asyncio.sleep(POLL_S)
        try:
            replicas.update((await _ask(client)).members)
        except (httpx.HTTPError, msgspec.DecodeError) as error:
            if not lost:
                log.warning("the cluster's router is gone, the known ranks stay: %s", error)
            lost = True
        else:
            lost = False


async def _ask(client: httpx.AsyncClient) -> Announced:
    answer = await client.get("/admin/members")
    answer.raise_for_status()
    return msgspec.json.decode(answer.content, type=Announced)
