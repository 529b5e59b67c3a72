"""Blocking transport calls off the engine's thread: a few lanes a target, results in a queue."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from queue import SimpleQueue

WRITER_THREADS = 4


@dataclass(frozen=True, slots=True)
class Written:
    """What a job did: nothing, when it was a renewal."""

    count: int = 0  # bytes
    took_s: float = 0.0  # in the transport
    checksums: tuple[int, ...] = ()


Job = Callable[[], Written]
Submit = Callable[[Job], "Future[Written]"]


@dataclass(frozen=True, slots=True)
class Finished:
    """A job that returned or raised: a write of ``room`` to ``target``, or (None) a renewal."""

    room: int | None
    target: str
    future: Future[Written]

    @property
    def error(self) -> BaseException | None:
        return self.future.exception()


class Writers:
    """Runs writes through ``submit``, or on threads of its own; to a target at most ``per_target``.

    The limit keeps a mute peer, whose writes hang for seconds, from taking all threads. All
    methods belong to the engine's thread; ``wake`` is called from others.
    """

    def __init__(
        self, submit: Submit | None, wake: Callable[[], None], per_target: int = 2
    ) -> None:
        self._pool = ThreadPoolExecutor(WRITER_THREADS, "kv-writer") if submit is None else None
        self._submit = submit or self._on_pool
        self._wake = wake
        self._per_target = per_target
        self._active: Counter[str] = Counter()
        self._queued: dict[str, deque[tuple[int, Job]]] = {}
        self._done: SimpleQueue[Finished] = SimpleQueue()

    def write(self, room: int, target: str, job: Job) -> None:
        """Run ``job`` as soon as a lane to ``target`` is free, in order."""
        if self._active[target] < self._per_target:
            self._active[target] += 1
            self._start(room, target, job)
        else:
            self._queued.setdefault(target, deque()).append((room, job))

    def renew(self, job: Job) -> None:
        """Run ``job`` at once, beside the lanes."""
        self._start(None, "", job)

    def finished(self) -> list[Finished]:
        """The jobs that ended since the last call."""
        ended = [self._done.get_nowait() for _ in range(self._done.qsize())]
        for item in ended:
            if item.room is not None:
                self._free(item.target)
        return ended

    def _free(self, target: str) -> None:
        if queue := self._queued.get(target):
            self._start(queue[0][0], target, queue.popleft()[1])
            return
        self._queued.pop(target, None)
        self._active[target] -= 1
        if not self._active[target]:
            del self._active[target]

    def _start(self, room: int | None, target: str, job: Job) -> None:
        def ended(future: Future[Written]) -> None:
            self._done.put(Finished(room, target, future))
            self._wake()

        self._submit(job).add_done_callback(ended)

    def _on_pool(self, job: Job) -> Future[Written]:
        assert self._pool is not None
        return self._pool.submit(job)

    def close(self) -> None:
        """Stop the threads after the jobs in progress; does not wait for them."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
