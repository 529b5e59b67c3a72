"""How fast does a prompt's KV cross? Our sender and receiver against raw Mooncake, same run.

    python -m bench.micro.handoff [--tokens 1000 4000] [--pairs 30] [--chunk 512]

Two processes on this machine, Mooncake over TCP, the pool of SmolLM2 (30 layers, K and V, 3 heads
of 64 bf16 numbers: 23,040 bytes a token). "raw" is one contiguous block of as many bytes. A turn of
each kind follows the other, so that a busy machine slows both. Ours counts from the first push to
the decode rank's Ready, with the messages over a pipe; raw to the return of the write. Of all turns
the fastest quarter's slowest counts: medians measure what else the machine does.
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
from statistics import quantiles

import numpy as np

from core.clock import RealClock
from disagg.geometry import PageGeometry
from disagg.receiver import Ready, Receiver
from disagg.sender import Sender
from disagg.transport.base import Copy, MemoryRegion
from disagg.transport.mooncake import MooncakeTransport

LAYERS, HEADS, HEAD_DIM, ELEMENT_BYTES = 30, 3, 64, 2
SLOT_BYTES = (HEADS * HEAD_DIM * ELEMENT_BYTES,) * (2 * LAYERS)
GEOMETRY = PageGeometry(kind="mha", slot_bytes=SLOT_BYTES, dtype="bfloat16", revision="bench")
HOST = "127.0.0.1"
SPREAD = 2  # slots a pool has for each token of the longest prompt
ORDER = struct.Struct("<qqq")  # room, tokens, slots in a run


class Pool:
    """Regions and one contiguous block beside them, registered."""

    def __init__(self, slots: int) -> None:
        self.regions = [np.ones((slots, size), np.uint8) for size in SLOT_BYTES]
        self.block = np.ones(slots * GEOMETRY.token_bytes // SPREAD, np.uint8)
        self.bases = [int(region.ctypes.data) for region in self.regions]
        self.base = int(self.block.ctypes.data)
        self.transport = MooncakeTransport(HOST)
        self.transport.register([MemoryRegion(int(r.ctypes.data), r.nbytes) for r in self.regions])
        self.raw = MooncakeTransport(HOST)
        self.raw.register([MemoryRegion(self.base, self.block.nbytes)])


def layout(tokens: int, run: int) -> np.ndarray:
    """Slots of a prompt in runs of ``run`` consecutive ones, 0 for a single run."""
    if not run:
        return np.arange(tokens, dtype=np.int32)
    index = np.arange(tokens, dtype=np.int32)
    return index + index // run  # a slot of somebody else after each run


def decode_rank(pipe: Connection, slots: int) -> None:
    """Announce what is asked for and hear Done, until the pipe closes."""
    pool = Pool(slots)
    receiver = Receiver(pool.transport, GEOMETRY, pool.bases, lambda _, data: pipe.send_bytes(data))
    pipe.send_bytes(f"{pool.raw.address} {pool.base}".encode())
    try:
        while True:
            room, tokens, run = ORDER.unpack(pipe.recv_bytes())
            receiver.announce(room, "bench", "prefill", 0, layout(tokens, run))
            receiver.on_message("prefill", pipe.recv_bytes())
            (outcome,) = receiver.poll()
            assert isinstance(outcome, Ready), outcome
            pipe.send_bytes(b"ready")
    except EOFError:
        pool.transport.close()
        pool.raw.close()


@dataclass(frozen=True, slots=True)
class Case:
    """What crosses in one turn."""

    name: str
    tokens: int
    chunk: int  # tokens pushed at once
    run: int = 0  # consecutive slots; 0: all


class Bench:
    """The prefill side."""

    def __init__(self, slots: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=decode_rank, args=(theirs, slots), daemon=True)
        self._process.start()
        theirs.close()
        self._pool = Pool(slots)
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
        self._pool.raw.write(self._target, [Copy(self._pool.base, self._base, size)])
        return self._clock.now() - began

    def handoff(self, case: Case) -> float:
        """Seconds from the first push to the decode rank's Ready, with the room claimed before."""
        self._room += 1
        sender, room, tokens = self._sender, self._room, case.tokens
        slots = layout(tokens, case.run)
        sender.open(room, "bench", tokens)
        self._pipe.send_bytes(ORDER.pack(room, tokens, case.run))
        sender.on_message("decode", self._pipe.recv_bytes())
        began = self._clock.now()
        for upto in (*range(case.chunk, tokens, case.chunk), tokens):
            sender.push(room, slots[:upto])
        sender.finish(room, 7)
        while not any(closed.ok for closed in sender.poll(self._clock.now())):
            self._woken.wait(5.0)
            self._woken.clear()
        assert self._pipe.recv_bytes() == b"ready"
        return self._clock.now() - began

    def close(self) -> None:
        self._sender.close()
        self._pipe.close()
        self._process.join(20)
        self._pool.transport.close()
        self._pool.raw.close()


def measure(bench: Bench, case: Case, pairs: int) -> tuple[float, float]:
    """Lower quartile of seconds (raw, ours) of interleaved turns, after two to warm up."""
    raws, ours = [], []
    for turn in range(pairs + 2):
        raw, own = bench.raw(case.tokens), bench.handoff(case)
        if turn >= 2:
            raws.append(raw)
            ours.append(own)
    return quantiles(raws)[0], quantiles(ours)[0]


def main(words: Sequence[str]) -> int:
    """Print a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1000, 4000])
    parser.add_argument("--pairs", type=int, default=30)
    parser.add_argument("--chunk", type=int, default=512, help="tokens of a prefill step")
    options = parser.parse_args(words)
    bench = Bench(SPREAD * max(options.tokens))
    print("| KV | bytes | raw | GB/s | ours | GB/s | ours / raw |\n| --- " + "| ---: " * 6 + "|")
    for tokens in options.tokens:
        for case in (
            Case("one piece", tokens, tokens),
            Case(f"chunks of {options.chunk}", tokens, options.chunk),
            Case("runs of 64 slots", tokens, tokens, run=64),
        ):
            size = tokens * GEOMETRY.token_bytes
            raw, ours = measure(bench, case, options.pairs)
            print(
                f"| {tokens} tokens, {case.name} | {size / 2**20:.1f} MiB"
                f" | {1000 * raw:.1f} ms | {size / raw / 1e9:.2f}"
                f" | {1000 * ours:.1f} ms | {size / ours / 1e9:.2f} | {raw / ours:.0%} |",
                flush=True,
            )
    bench.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
