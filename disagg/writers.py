"""Blocking transport calls on threads of their own: a few lanes a target, results in a queue."""

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
    written: Written = Written()
    error: BaseException | None = None


class Writers:
    """Runs writes through ``submit``, or on threads of its own; to a target at most ``per_target``.

    The limit keeps a mute peer, whose writes hang for seconds, from taking all threads. Methods
    are not to be called by two threads at once. ``ended`` is called by each job's own thread when
    its result is there: never within a call of a method.
    """

    def __init__(
        self, submit: Submit | None, ended: Callable[[], None], per_target: int = 2
    ) -> None:
        self._pool = ThreadPoolExecutor(WRITER_THREADS, "kv-writer") if submit is None else None
        self._submit = submit or self._on_pool
        self._ended = ended
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
        def run() -> Written:
            try:
                written = job()
            except BaseException as error:  # the owner of the result is to hear of any
                self._tell(Finished(room, target, error=error))
                raise
            self._tell(Finished(room, target, written))
            return written

        self._submit(run)

    def _tell(self, item: Finished) -> None:
        self._done.put(item)
        self._ended()

    def _on_pool(self, job: Job) -> Future[Written]:
        assert self._pool is not None
        return self._pool.submit(job)

    def close(self) -> None:
        """Stop the threads after the jobs in progress; does not wait for them."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
