"""Assemble an Engine from a RankSpec: model, pools, scheduler, role."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from core.config import RankSpec
from core.wire import Incarnation, Role
from disagg.geometry import PageGeometry
from disagg.receiver import Receiver
from disagg.sender import Sender
from disagg.transport.base import TRANSPORTS, KVTransport, MemoryRegion
from worker.architectures import read_spec
from worker.cache.kv_pool import KVPool
from worker.cache.prefix_cache import PrefixCache
from worker.checkpoint import weight_files
from worker.engine import Engine
from worker.model_spec import ModelSpec
from worker.models.weights import load_model
from worker.roles.base import Role as RoleBehaviour
from worker.roles.decode import DecodeRole
from worker.roles.local_prefill import LocalPrefill
from worker.roles.prefill import PrefillRole
from worker.roles.unified import UnifiedRole
from worker.runner import ModelRunner
from worker.scheduler.admission import Limits
from worker.scheduler.scheduler import Scheduler
from worker.streams import Streams


@dataclass(frozen=True, slots=True)
class Built:
    """An engine, and what its host has to know and to close."""

    engine: Engine
    bytes_per_token: int
    transport: KVTransport | None

    def close(self) -> None:
        self.engine.role.close()
        if self.transport is not None:
            self.transport.close()


class Wiring(Protocol):
    """How an engine reaches its peers and its own loop. No call may block."""

    def dial(self, target: Incarnation) -> str:
        """A name for the link to ``target``, for ``send``."""
        ...

    def send(self, peer: str, data: bytes) -> None: ...

    def drop(self, peer: str) -> None:
        """End a link whose peer makes no sense; its loss is reported like any other."""
        ...

    def wake(self) -> None:
        """Ask for a step; from any thread."""
        ...


def build(
    spec: RankSpec,
    wiring: Wiring,
    transport: Callable[[], KVTransport] | None = None,
) -> Built:
    """Load the model and make the rank's engine. Takes seconds; raises OperatorError.

    ``transport`` overrides the configured one, for tests.
    """
    torch.set_num_threads(spec.group.threads)
    model_spec = read_spec(Path(spec.folder))
    dtype = getattr(torch, spec.dtype)
    slots, page_size, context_len = spec.group.kv_tokens, spec.group.page_size, spec.context_len
    model = load_model(Path(spec.folder), model_spec, dtype, spec.group.attention)
    pool = KVPool(model_spec, slots, dtype, shared=spec.role is not Role.UNIFIED)
    # Twice the running set: sequences that send or await KV hold rows beside those that run.
    cache = PrefixCache(slots, 2 * spec.group.max_running, context_len, page_size)
    limits = Limits(
        max_running=spec.group.max_running,
        step_tokens=spec.group.step_tokens,
        context_len=context_len,
        # A prefill rank generates one token, which needs no page.
        conservativeness=0 if spec.role is Role.PREFILL else spec.group.conservativeness,
    )
    scheduler, streams = Scheduler(cache, limits, spec.group.schedule), Streams()
    eos = frozenset(model_spec.eos_token_ids)
    link = None
    role: RoleBehaviour
    if spec.role is Role.UNIFIED:
        role = UnifiedRole(scheduler, streams, eos)
    else:
        link = (transport or (lambda: _transport(spec)))()
        link.register([MemoryRegion(*pool.span, pool.file)])
        geometry = _geometry(spec, model_spec, pool)
        bases = [base for base, _ in pool.regions()]
        if spec.role is Role.PREFILL:
            timeout_s = spec.disagg.claim_timeout_s
            check = spec.disagg.checksum
            sender = Sender(link, geometry, bases, wiring.send, wiring.wake, timeout_s, check=check)
            role = PrefillRole(scheduler, streams, sender, eos)
        else:
            receiver = Receiver(link, geometry, bases, wiring.send)
            local = LocalPrefill(spec.disagg.local_prefill, spec.group.step_tokens)
            role = DecodeRole(scheduler, streams, receiver, wiring.dial, eos, local)
    runner = ModelRunner(model, pool, cache.table, eos)
    engine = Engine(role, scheduler, runner, streams, wiring.drop)
    engine.overlap, engine.strict = spec.group.overlap, False
    return Built(engine, pool.bytes_per_token, link)


def _transport(spec: RankSpec) -> KVTransport:
    factory = TRANSPORTS.load(spec.disagg.transport)
    return factory(host=spec.host, protocol=spec.disagg.protocol, device=spec.disagg.device)


def _geometry(spec: RankSpec, model: ModelSpec, pool: KVPool) -> PageGeometry:
    return PageGeometry(
        kind="mha" if model.mla is None else "mla",
        slot_bytes=tuple(size for _, size in pool.regions()),
        dtype=spec.dtype,
        revision=revision(Path(spec.folder)),
        page_size=spec.group.page_size,
    )


def revision(folder: Path) -> str:
    """What tells two versions of a model apart without reading its weights.

    Of config.json and the weights' names and sizes: a copied folder has the same revision.
    """
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    for file in weight_files(folder):
        digest.update(f"{file.name}:{file.stat().st_size}".encode())
    return digest.hexdigest()[:16]
