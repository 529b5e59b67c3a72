"""A step loop in a thread behind a real RankServer: it records events and answers as told."""

from __future__ import annotations

import queue
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from core import wire
from core.dump import QueueView, RankDump, thread_stacks
from core.lease import Health
from core.rpc import events
from core.rpc.server import RankServer, ServerLimits
from tests.support.wires import incarnation, rank_info, rank_status


class StepThread:
    """Implements core.rpc.events.StepPort.

    ``answer(thread, event)`` runs in the thread for each event; the default emits all tokens of a
    submitted request in one report, and answers pings and status questions.
    """

    def __init__(self, info: wire.RankInfo, server: RankServer) -> None:
        self.info = info
        self.server = server
        self.events: list[events.RankEvent] = []
        self.healths: list[Health] = []  # of the next renewals; then it is well
        self.deaf = False  # events are recorded and not answered
        self.answer: Callable[[StepThread, events.RankEvent], None] = answer_all
        self._queue: queue.SimpleQueue[events.RankEvent | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def post(self, event: events.RankEvent) -> None:
        self._queue.put(event)

    def health(self) -> Health:
        return self.healths.pop(0) if self.healths else Health(step=1, turn=1, busy_s=0.0)

    def glance(self) -> RankDump:
        return RankDump(
            incarnation=self.info.incarnation,
            pid=self.info.pid,
            uptime_s=1.0,
            busy=None,
            stuck_steps=0,
            steps=(),
            threads=thread_stacks(),
        )

    def stop(self) -> None:
        self._queue.put(None)
        self._thread.join()

    def seen(self, kind: type) -> list[events.RankEvent]:
        return [event for event in self.events if isinstance(event, kind)]

    def _run(self) -> None:
        while (event := self._queue.get()) is not None:
            self.events.append(event)
            if not self.deaf:
                self.answer(self, event)


def answer_all(thread: StepThread, event: events.RankEvent) -> None:
    load = wire.LoadReport(steps=len(thread.events))
    match event:
        case events.Submitted(router=router, request=request):
            count = request.params.max_new_tokens
            chunk = wire.TokenChunk(
                rid=request.rid,
                offset=0,
                token_ids=tuple(range(count)),
                finish=wire.FinishReason.LENGTH,
            )
            thread.server.deliver(router, wire.StepReport(chunks=(chunk,), load=load))
        case events.Pinged(router=router):
            thread.server.deliver(router, wire.StepReport(chunks=(), load=load))
        case events.StatusAsked(reply=reply):
            reply(rank_status(thread.info))
        case events.QueuesAsked(reply=reply):
            pages = rank_status(thread.info).pages
            reply(QueueView(pages=pages, sequences=(), rooms=()))


@asynccontextmanager
async def serving(
    limits: ServerLimits | None = None,
    *,
    nonce: str = "n0",
    on_renewal: Callable[[str], None] = lambda _: None,
) -> AsyncIterator[StepThread]:
    """A rank that is being served on a loopback port."""
    server = RankServer(limits or ServerLimits(), on_renewal)
    life = incarnation(endpoint=server.bind(), nonce=nonce)
    thread = StepThread(rank_info(life), server)
    await server.start(thread)
    try:
        yield thread
    finally:
        await server.stop(0.1)
        thread.stop()
