"""What a streamed token costs outside of the model: CPU time of the router process.

``python -m bench.micro.stream [--streams 16] [--step-ms 10]``

The router of this process is a whole one: HTTP over loopback, routing, its session with a rank.
The rank and the clients are in a process of their own: the rank says one token for each request
every ``step-ms``, as a model does. Prints a Markdown table: of all threads of this process, with
what reading, routing and ending the requests takes, divided by the tokens.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import queue
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from bench.micro.timing import Times, load_line
from cluster.fronts import listen
from cluster.routing import router
from core import wire
from core.config import RouterConfig
from core.dump import RankDump
from core.lease import Health
from core.rpc import events
from core.rpc.server import RankServer
from router.replicas import Member
from router.text.request import ServedModel

TOKENS = 64  # of output, of each request
ROUNDS = 8  # requests of each client, one after the other
CONTEXT = 4096
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
PROMPT = "Once upon a time"
BODIES: dict[str, dict[str, object]] = {
    "/v1/completions": {"prompt": PROMPT},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": PROMPT}]},
}
RANK = wire.RankId(group="unified", replica=0)


class EvenRank:
    """Implements core.rpc.events.StepPort: a token a step for each request, and no model."""

    def __init__(self, info: wire.RankInfo, server: RankServer, step_s: float) -> None:
        self.info = info
        self._server = server
        self._step_s = step_s
        self._events: queue.SimpleQueue[events.RankEvent] = queue.SimpleQueue()
        self._live: dict[str, Iterator[wire.TokenChunk]] = {}
        self._router = ""
        threading.Thread(target=self._run, daemon=True).start()

    def post(self, event: events.RankEvent) -> None:
        self._events.put(event)

    def health(self) -> Health:
        return Health(step=1, turn=1, busy_s=0.0)

    def glance(self) -> RankDump:
        raise NotImplementedError("nobody asks a rank of a benchmark for a dump")

    def _run(self) -> None:
        pause = threading.Event()
        while True:
            pause.wait(self._step_s)
            pinged = self._take_events()
            if self._live or pinged:
                chunks = tuple(next(chunks) for chunks in self._live.values())
                for chunk in chunks:
                    if chunk.last:
                        del self._live[chunk.rid]
                load = wire.LoadReport(running_requests=len(self._live))
                self._server.deliver(self._router, wire.StepReport(chunks=chunks, load=load))

    def _take_events(self) -> bool:
        """Whether one of them was a ping."""
        pinged = False
        while not self._events.empty():
            match self._events.get():
                case events.Submitted(router=router, request=request):
                    self._live[request.rid] = _output(request)
                case events.Aborted(rid=rid):
                    self._live.pop(rid, None)
                case events.Pinged(router=router):
                    self._router, pinged = router, True
        return pinged


def _output(request: wire.TokenRequest) -> Iterator[wire.TokenChunk]:
    """Letters, one in each chunk."""
    count = request.params.max_new_tokens
    for offset in range(count):
        last = offset == count - 1
        yield wire.TokenChunk(
            rid=request.rid,
            offset=offset,
            token_ids=(ord("a") + offset % 26,),
            finish=wire.FinishReason.LENGTH if last else None,
            last=last,
            usage=None if offset else wire.Usage(prompt_tokens=request.prompt_len),
        )


async def rank_and_clients(streams: int, step_s: float) -> None:
    """The other process: says where its rank is, then runs a load for each line that it reads."""
    server = RankServer()
    life = wire.Incarnation(rank=RANK, endpoint=server.bind(), nonce="bench")
    info = wire.RankInfo(
        incarnation=life, role=wire.Role.UNIFIED, model="letters", context_len=CONTEXT,
        total_pages=1 << 20, page_size=1, kv_bytes_per_token=1, dtype="none", attention="none",
        threads=1, pid=0,
    )  # fmt: skip
    await server.start(EvenRank(info, server, step_s))
    print(life.endpoint, flush=True)
    while line := await asyncio.to_thread(sys.stdin.readline):
        port, path = line.split()
        await asyncio.gather(*(_client(int(port), path) for _ in range(streams)))
        print("done", flush=True)


async def _client(port: int, path: str) -> None:
    body = json.dumps(BODIES[path] | {"max_tokens": TOKENS, "stream": True})
    head = (
        f"POST {path} HTTP/1.1\r\nhost: bench\r\ncontent-type: application/json\r\n"
        f"connection: close\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    for _ in range(ROUNDS):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write((head + body).encode())
        answer = await reader.read(-1)
        writer.close()
        if answer.count(b"data: ") < TOKENS or b"[DONE]" not in answer:
            raise RuntimeError(f"the router answered {answer!r}")


@asynccontextmanager
async def serving(endpoint: str) -> AsyncIterator[int]:
    """A router in front of the rank at ``endpoint``; gives its port."""
    settings = RouterConfig(port=0, grpc=False, tokenizer="bytes")
    model = ServedModel(name="letters", context_len=CONTEXT, vocab_size=258)
    port: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    stop = asyncio.Event()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
        async with router(settings, model, folder) as parts, asyncio.TaskGroup() as tasks:
            life = wire.Incarnation(rank=RANK, endpoint=endpoint, nonce="bench")
            parts.replicas.update([Member(life, wire.Role.UNIFIED)])
            tasks.create_task(
                listen(settings, parts.app, None, lambda http, _: port.set_result(http), stop)
            )
            while not parts.replicas.complete:
                await parts.replicas.change().wait()
            try:
                yield await port
            finally:
                stop.set()


async def table(streams: int, step_s: float, repeats: int) -> AsyncIterator[str]:
    """The lines of the table."""
    tokens = streams * ROUNDS * TOKENS
    yield f"{streams} streams, {step_s * 1e3:g} ms a step; µs of CPU a token. {load_line()}\n"
    yield "| answer | least | quartile | median |\n|---|---:|---:|---:|"
    arguments = ("--streams", str(streams), "--step-ms", str(step_s * 1e3), "--rank")
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "bench.micro.stream", *arguments,
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    assert child.stdin is not None
    assert child.stdout is not None
    endpoint = (await child.stdout.readline()).decode().strip()
    async with serving(endpoint) as port:
        for path in BODIES:
            spent = []
            for _ in range(repeats + 1):
                start = time.process_time()
                child.stdin.write(f"{port} {path}\n".encode())
                if await child.stdout.readline() != b"done\n":
                    raise RuntimeError("the clients failed")
                spent.append((time.process_time() - start) / tokens)
            yield f"| {path} | {Times.of(spent[1:]).cells(1e-6)} |"
    child.stdin.close()
    await child.wait()


async def _print_table(streams: int, step_s: float, repeats: int) -> None:
    async for line in table(streams, step_s, repeats):
        print(line, flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, prog="python -m bench.micro.stream")
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--step-ms", type=float, default=10.0)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args(argv)
    work = (
        rank_and_clients(given.streams, given.step_ms / 1e3)
        if given.rank
        else _print_table(given.streams, given.step_ms / 1e3, given.repeats)
    )
    asyncio.run(work)
    return 0


if __name__ == "__main__":
    sys.exit(main())
