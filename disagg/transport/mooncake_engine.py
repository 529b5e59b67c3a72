"""One engine of the Mooncake Transfer Engine. Imports little: a small process starts with it.

Facts that shaped it, each measured with version 0.3.13 over TCP:

* A batch beyond the queue of its peer fails; so batches are small.
* An error code does not mean stopped: blocks of a failed batch land later. Only the end of an
  engine, or of its process, makes sure. Unregistering its memory is not enough for a block that
  has begun.
* Ending an engine takes 0.7 to 5 s, and holds the interpreter lock all the while; ending its
  process takes milliseconds.
* An engine remembers what it learnt of a peer, and never reaches one that restarted on its old
  port; a new engine does, and each failed write ends in one. Without that memory
  (MC_DISABLE_METACACHE) every write asks the peer first, and hangs for minutes when it is frozen.
* The first write to a frozen peer hangs for 61 s, whatever the time-outs say.
* It keeps four connections to each peer's engine, also when that is gone.
* A new engine may get a port that an old one had; a writer's stale address must never come true.
* The synchronous calls spin until all has crossed, which takes a core from the threads that move
  it, and from the model. 23 MB between two processes on two cores take 11.5 ms so, and 6.6 ms
  where the caller sleeps meanwhile.
* A batch can only be waited for by spinning; the state of a single write can be asked for, once
  after it has ended.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from importlib import import_module
from typing import Any

from core.clock import Clock, RealClock
from core.env import set_default
from core.errors import PreflightError, TransferError
from disagg.transport.underway import Underway

BATCH_BLOCKS = 1000  # the engine's own queue holds 1024 for each peer
PORT_TRIES = 16
# Addresses of its own that a rank does not take again, the latest ones. A replacement takes 0.1 s,
# so they span 50 s at the least; who still writes to an older one would have had to be frozen that
# long, and the supervisor kills a frozen rank after cluster.lease.lease_s, 10 s. Mooncake draws
# from 2,000 ports: enough are left.
AVOIDED = 500
POLL_S = 50e-6  # between two looks at a write; the kernel makes it about twice as long
LIMIT_S = 5.0  # of a batch
WAITING, COMPLETED, FAILED = 0, 1, -1  # states of a write

DEFAULTS = {
    "MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER": "65535",
    "MC_TRANSFER_TIMEOUT": "5",  # seconds until a write to a mute peer fails; 30 by default
    "MC_TCP_PROGRESS_TIMEOUT_SEC": "2",
    "MC_LOG_LEVEL": "ERROR",
}


class Engine:
    """One TransferEngine with its registered memory, ended when the last write has left it."""

    def __init__(self, host: str, protocol: str, device: str, clock: Clock | None = None) -> None:
        self._clock = clock or RealClock()
        self._spins = protocol != "tcp"  # over RDMA a write takes little longer than a sleep
        self.raw: Any = _engine_class()()  # opaque: an extension type without stubs
        code = self.raw.initialize(host, "P2PHANDSHAKE", protocol, device)
        if code != 0:
            raise TransferError(
                f"Mooncake could not start on {host} over {protocol} (code {code}): check that the "
                "address is this machine's, and that ports 15000 to 17000 are not all taken"
            )
        self.address = f"{host}:{self.raw.get_rpc_port()}"
        self._opened: list[int] = []
        self.underway = Underway()  # ``end`` waits for it

    def register(self, address: int, length: int) -> None:
        """Open ``length`` bytes at ``address``. Raises TransferError."""
        code = self.raw.register_memory(address, length)
        if code != 0:
            raise TransferError(f"Mooncake could not register {length} bytes (code {code})")
        self._opened.append(address)

    def write(
        self, target: str, sources: Sequence[int], targets: Sequence[int], lengths: Sequence[int]
    ) -> int:
        """One batch of lists; 0 when all is visible to the target, else what the engine said."""
        if self._spins:
            code: int = self.raw.batch_transfer_sync_write(target, sources, targets, lengths)
            return code
        numbers = []
        for block in zip(sources, targets, lengths, strict=True):
            if (number := self.raw.transfer_submit_write(target, *block)) == 0:
                return FAILED
            numbers.append(number)
        deadline = self._clock.now() + LIMIT_S
        # the last one ends last, as a rule: then the others are asked only once
        return next((code for n in reversed(numbers) if (code := self._wait(n, deadline))), 0)

    def _wait(self, number: int, deadline: float) -> int:
        """How the write ended: 0 is well."""
        while (state := self.raw.transfer_check_status(number)) == WAITING:
            if self._clock.now() > deadline:
                return FAILED
            self._clock.sleep(POLL_S)
        return 0 if state == COMPLETED else int(state)

    def end(self) -> None:
        """Let nothing more land or be read. Returns when that is so."""
        self.underway.wait()
        if self.raw is None:
            return
        for address in self._opened:
            self.raw.unregister_memory(address)
        self.raw = None  # the last reference: ends the engine's threads and connections


def fresh_engine(host: str, protocol: str, device: str, used: Collection[str]) -> Engine:
    """An engine whose address is none of ``used``. Raises PreflightError or TransferError."""
    # kept until a new address is found, so that theirs are not drawn again
    repeated: list[Engine] = []
    for _ in range(PORT_TRIES):
        engine = Engine(host, protocol, device)
        if engine.address not in used:
            for other in repeated:
                other.end()
            return engine
        repeated.append(engine)
    raise TransferError(f"Mooncake found no unused port on {host}")


def _engine_class() -> Any:  # opaque: an extension type without stubs
    """The TransferEngine class; its defaults have to be set before it is loaded."""
    for name, value in DEFAULTS.items():
        set_default(name, value)
    try:
        return import_module("mooncake.engine").TransferEngine
    except ImportError as error:
        fix = "pip install mooncake-transfer-engine-non-cuda"
        if "libibverbs" in str(error):
            fix = "apt-get install -y libibverbs1"
        elif ".so" in str(error):
            fix = "apt-get install -y libibverbs1 libnuma1 libcurl4"
        raise PreflightError(f"Mooncake cannot be loaded ({error}): {fix}") from error
