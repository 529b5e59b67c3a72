"""How fast does a prompt's KV cross? Our sender and receiver against raw Mooncake, same run.

    python -m bench.micro.handoff [--tokens 1000 4000] [--pairs 30] [--chunk 512]
                                  [--transport mooncake_inline]

Two processes on this machine, Mooncake over TCP, the pool of SmolLM2 (30 layers, K and V, 3 heads
of 64 bf16 numbers: 23,424 bytes a token in six blocks, of which 384 are padding). "raw" is one
call of Mooncake's transfer_sync_write for one contiguous block of as many bytes, in the same kind
of memory, by an engine in the same process. A turn of each kind follows the other, so that a busy
machine slows both. Ours counts from the first push to the decode rank's Ready, with the messages
over a pipe; raw to the return of the write. Of all turns the fastest quarter's slowest counts:
medians measure what else the machine does. "under traffic" are the slots that such a prompt gets
on a prefill and on a decode rank whose pools have long been full (bench.micro.churn), another
prompt in each turn, pushed in chunks.
"""

from __future__ import annotations

import argparse
import multiprocessing
import struct
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from statistics import mean, quantiles

import numpy as np

from bench.micro.attention import SMOLLM
from bench.micro.churn import Churn, Traffic
from core.clock import RealClock
from core.shared_memory import SharedMemory
from core.wire import Int32Array, Role, pack_ids, unpack_ids
from disagg.geometry import PageGeometry, copies
from disagg.receiver import Ready, Receiver
from disagg.sender import Sender
from disagg.transport.base import TRANSPORTS, MemoryRegion
from disagg.transport.mooncake_engine import fresh_engine

BLOCKS = tuple(block.slot_bytes for block in SMOLLM.spec(layers=30).kv_blocks(2))
GEOMETRY = PageGeometry(kind="mha", slot_bytes=BLOCKS, dtype="bfloat16", revision="bench")
HOST = "127.0.0.1"
TRAFFIC = Traffic(running=6)
SLOTS = 20_000  # of a pool
SERVED = 150  # requests until a pool has been turned over many times
PROMPTS = 5  # different ones under traffic
ROOM = struct.Struct("<q")


class Pool:
    """A pool in shared memory, and one contiguous block beside it, registered."""

    def __init__(self, block_bytes: int, transport: str) -> None:
        self.memory = memory = SharedMemory(SLOTS * GEOMETRY.token_bytes)
        self.block = SharedMemory(block_bytes)
        starts = np.cumsum((0, *BLOCKS[:-1])) * SLOTS
        self.bases = [memory.address + int(start) for start in starts]
        self.base = self.block.address
        self.transport = TRANSPORTS.load(transport)(HOST)
        self.transport.register([MemoryRegion(memory.address, memory.length, memory.file)])
        self.engine = fresh_engine(HOST, "tcp", "", ())
        self.engine.register(self.base, block_bytes)

    def close(self) -> None:
        self.transport.close()
        self.engine.end()


def decode_rank(pipe: Connection, block_bytes: int, transport: str) -> None:
    """Announce the slots that are sent and hear Done, until the pipe closes."""
    pool = Pool(block_bytes, transport)
    receiver = Receiver(pool.transport, GEOMETRY, pool.bases, lambda _, data: pipe.send_bytes(data))
    pipe.send_bytes(f"{pool.engine.address} {pool.base}".encode())
    try:
        while True:
            order = pipe.recv_bytes()
            (room,) = ROOM.unpack(order[: ROOM.size])
            receiver.announce(room, "bench", "prefill", 0, unpack_ids(order[ROOM.size :]))
            receiver.on_message("prefill", pipe.recv_bytes())
            (outcome,) = receiver.poll()
            assert isinstance(outcome, Ready), outcome
            pipe.send_bytes(b"ready")
    except EOFError:
        pool.close()


Layout = tuple[Int32Array, Int32Array]  # slots on the prefill rank, and on the decode rank


@dataclass(frozen=True, slots=True)
class Case:
    """What crosses in one turn; the layouts take turns."""

    name: str
    tokens: int
    chunk: int  # tokens pushed at once
    layouts: tuple[Layout, ...]

    @property
    def copies(self) -> float:
        """Stretches that are written, on average."""
        bases = (0,) * len(BLOCKS)
        return mean(len(copies(GEOMETRY, bases, a, bases, b)) for a, b in self.layouts)


def in_runs(tokens: int, run: int) -> Layout:
    """Stretches of ``run`` slots, each followed by a slot of somebody else."""
    index = np.arange(tokens, dtype=np.int32)
    slots = (index + index // run).astype(np.int32)
    return slots, slots


def cases(tokens: int, chunk: int, ranks: tuple[Churn, Churn]) -> list[Case]:
    """All cases of a prompt of ``tokens``; ``ranks`` are a prefill and a decode rank's pools."""
    here, there = ranks
    traffic = tuple((here.place(tokens), there.place(tokens)) for _ in range(PROMPTS))
    whole = (in_runs(tokens, tokens),)
    return [
        Case("one piece", tokens, tokens, whole),
        Case(f"chunks of {chunk}", tokens, chunk, whole),
        Case("runs of 64 slots", tokens, tokens, (in_runs(tokens, 64),)),
        Case("runs of 16 slots", tokens, tokens, (in_runs(tokens, 16),)),
        Case("under traffic", tokens, chunk, traffic),
    ]


class Bench:
    """The prefill side."""

    def __init__(self, block_bytes: int, transport: str) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        parts = (theirs, block_bytes, transport)
        self._process = context.Process(target=decode_rank, args=parts)
        self._process.start()
        theirs.close()
        self._pool = Pool(block_bytes, transport)
        self._woken = threading.Event()
        self._clock = RealClock()
        self._sender = Sender(
            self._pool.transport,
            GEOMETRY,
            self._pool.bases,
            lambda _, data: self._pipe.send_bytes(data),
            self._woken.set,
        )
        address, base = self._pipe.recv_bytes().decode().split()
        self._target, self._base = address, int(base)
        self._room = 0

    def raw(self, tokens: int) -> float:
        """Seconds of one contiguous write of as many bytes."""
        size = tokens * GEOMETRY.token_bytes
        began = self._clock.now()
        code = self._pool.engine.raw.transfer_sync_write(
            self._target, self._pool.base, self._base, size
        )
        took_s = self._clock.now() - began
        assert code == 0, code
        return took_s

    def handoff(self, case: Case, turn: int) -> float:
        """Seconds from the first push to the decode rank's Ready, with the room claimed before."""
        self._room += 1
        sender, room, tokens = self._sender, self._room, case.tokens
        here, there = case.layouts[turn % len(case.layouts)]
        sender.open(room, "bench", tokens)
        self._pipe.send_bytes(ROOM.pack(room) + pack_ids(there))
        sender.on_message("decode", self._pipe.recv_bytes())
        began = self._clock.now()
        for upto in (*range(case.chunk, tokens, case.chunk), tokens):
            sender.push(room, here[:upto])
        sender.finish(room, 7)
        assert self._pipe.recv_bytes() == b"ready"
        took_s = self._clock.now() - began
        while not sender.poll(began):
            self._woken.wait(5.0)
            self._woken.clear()
        return took_s

    def close(self) -> None:
        self._sender.close()
        self._pipe.close()
        self._process.join(20)
        self._pool.close()


def measure(bench: Bench, case: Case, pairs: int) -> tuple[float, float]:
    """Lower quartile of seconds (raw, ours) of interleaved turns, after some to warm up."""
    raws, ours = [], []
    warm = max(2, len(case.layouts))
    for turn in range(pairs + warm):
        raw, own = bench.raw(case.tokens), bench.handoff(case, turn)
        if turn >= warm:
            raws.append(raw)
            ours.append(own)
    return quantiles(raws)[0], quantiles(ours)[0]


def main(words: Sequence[str]) -> int:
    """Print a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1000, 4000])
    parser.add_argument("--pairs", type=int, default=30)
    parser.add_argument("--chunk", type=int, default=512, help="tokens of a prefill step")
    kinds = ("mooncake", "mooncake_inline")
    parser.add_argument("--transport", choices=kinds, default=kinds[0], help="of ours")
    options = parser.parse_args(words)
    ranks = Churn(Role.PREFILL, SLOTS, TRAFFIC), Churn(Role.DECODE, SLOTS, TRAFFIC)
    for rank in ranks:
        rank.serve(SERVED)
    bench = Bench(max(options.tokens) * GEOMETRY.token_bytes, options.transport)
    print("| KV | copies | bytes | raw | GB/s | ours | GB/s | ours / raw |")
    print("| --- " + "| ---: " * 7 + "|")
    for tokens in options.tokens:
        size = tokens * GEOMETRY.token_bytes
        for case in cases(tokens, options.chunk, ranks):
            raw, ours = measure(bench, case, options.pairs)
            print(
                f"| {tokens} tokens, {case.name} | {case.copies:.0f} | {size / 2**20:.1f} MiB"
                f" | {1000 * raw:.1f} ms | {size / raw / 1e9:.2f}"
                f" | {1000 * ours:.1f} ms | {size / ours / 1e9:.2f} | {raw / ours:.0%} |",
                flush=True,
            )
    bench.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
