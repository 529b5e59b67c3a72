"""``antiphon serve`` as a user runs it: a process of its own, found by the line it prints."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from openai import AsyncOpenAI, OpenAI

from tests.support.eventually import eventually

ANTIPHON = Path(sys.executable).with_name("antiphon")
ANY_PORTS = ("router.port=0", "router.grpc_port=0")
READY = re.compile(r"^ready: (\S+) on (https?://[\d.]+:\d+)(?:, gRPC \(\S+\) on (\S+))?")


class Served:
    """One server in a session of its own, so that everything it starts can be found again.

    Its lines also go to stderr, where pytest shows those that came while a failing test ran.
    """

    def __init__(self, words: Sequence[str], command: str = "serve") -> None:
        self.process = subprocess.Popen(
            [ANTIPHON, command, *ANY_PORTS, *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self.lines: list[str] = []
        self.model = ""
        self.url = ""
        self.rpc = ""  # address of the gRPC front
        self._heard = threading.Condition()
        self._ended = False
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as out:
            for line in out:
                sys.stderr.write(line)
                with self._heard:
                    self.lines.append(line)
                    if found := READY.match(line):
                        self.model, self.url, self.rpc = found.groups(default="")
                    self._heard.notify_all()
        with self._heard:
            self._ended = True
            self._heard.notify_all()

    @property
    def log(self) -> str:
        return "".join(self.lines)

    def wait_for(self, text: str, timeout_s: float = 60.0) -> None:
        """Return once a line holds ``text``; fail where the output ends before or time is up."""
        with self._heard:
            self._heard.wait_for(lambda: self._ended or text in self.log, timeout_s)
        assert text in self.log, self.log

    def wait_ready(self, timeout_s: float = 60.0) -> None:
        self.wait_for("Ctrl-C stops everything", timeout_s)

    # --- asking ------------------------------------------------------------

    def client(self, **options: Any) -> OpenAI:
        return OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, **options)

    def async_client(self) -> AsyncOpenAI:
        return AsyncOpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0)

    def get(self, path: str) -> httpx.Response:
        return httpx.get(f"{self.url}{path}", timeout=30, trust_env=False)

    def rank(self, name: str) -> dict[str, Any]:
        """What /status says of the one rank whose name begins with ``name``."""
        (found,) = [r for r in self.get("/status").json()["ranks"] if r["rank"].startswith(name)]
        return found

    def at_rest(self) -> bool:
        """Whether all ranks are up, idle, and have every page where it belongs."""
        status = self.get("/status").json()
        return bool(status["ready"]) and all(map(_at_rest, status["ranks"]))

    # --- ending ------------------------------------------------------------

    def processes(self) -> list[str]:
        """Pid and command of every process of the session, without those that are dead."""
        return [line for line in _all_processes() if line.split()[1] == str(self.process.pid)]

    def stop(self, number: int = signal.SIGINT, timeout_s: float = 30.0) -> int:
        """Send the signal; the exit code, once nothing of the session is left."""
        self.process.send_signal(number)
        code = self.process.wait(timeout_s)
        self.gone(self.processes)
        return code

    def gone(self, processes: Callable[[], list[str]], timeout_s: float = 20.0) -> None:
        """Return when ``processes`` finds none; fail when one stays."""
        try:
            asyncio.run(eventually(lambda: not processes(), timeout_s))
        except TimeoutError:
            raise AssertionError(f"left behind: {processes()}") from None

    def close(self) -> None:
        """End what a failed test left, by force."""
        for line in self.processes():
            try:
                os.kill(int(line.split()[0]), signal.SIGKILL)
            except ProcessLookupError:
                continue  # it went with another one
        self.process.wait()
        self._reader.join()


@contextmanager
def started(*words: str, interrupts: bool = True) -> Iterator[Served]:
    """A server that has just been told to start; the caller stops it.

    Without ``interrupts`` it starts with SIGINT ignored, as under nohup.
    """
    inherited = signal.default_int_handler if interrupts else signal.SIG_IGN
    before = signal.signal(signal.SIGINT, inherited)
    try:
        served = Served(words)
    finally:
        signal.signal(signal.SIGINT, before)
    try:
        yield served
    finally:
        served.close()


@contextmanager
def serving(*words: str) -> Iterator[Served]:
    """A server that answers; stopped by Ctrl-C, after which nothing may be left of it."""
    with started(*words) as served:
        served.wait_ready()
        yield served
        assert served.stop() == 0, served.log


def _at_rest(rank: dict[str, Any]) -> bool:
    if rank["state"] != "up":
        return False
    load, pages = rank["load"], rank["pages"]
    idle = not (load["running_requests"] or load["waiting_requests"] or load["handoff_requests"])
    whole = pages["free"] + pages["cached"] + pages["owned"] == pages["total"]
    return idle and whole and pages["owned"] == 0 and not any(rank["handoffs"].values())


def _all_processes() -> list[str]:
    """ "pid session command" of everything that runs."""
    done = subprocess.run(
        ["ps", "-eo", "pid=,sess=,stat=,args="], capture_output=True, text=True, check=True
    )
    rows = [line.split(maxsplit=3) for line in done.stdout.splitlines()]
    return [f"{row[0]} {row[1]} {row[3][:100]}" for row in rows if not row[2].startswith("Z")]
