"""How tests run coroutines and wait: a condition with a time-out, and no task left behind."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


async def eventually(
    condition: Callable[[], object], timeout_s: float = 10.0, poll_s: float = 0.002
) -> None:
    """Return as soon as the condition holds; fail after the time-out."""
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110 - conditions of other threads set no asyncio.Event
            await asyncio.sleep(poll_s)


def run_tidy(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """asyncio.run, and fail where ``main`` left one of our tasks running or a callback raised."""
    complaints: list[dict[str, Any]] = []

    async def checked() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, what: complaints.append(what))
        await main()
        try:
            await eventually(lambda: not _ours(), timeout_s=2.0)
        except TimeoutError:
            raise AssertionError(f"tasks were left behind: {_ours()}") from None

    asyncio.run(checked())
    assert not complaints, complaints


def _ours() -> list[asyncio.Task[Any]]:
    folders = (str(ROOT / "core"), str(ROOT / "router"))
    return [task for task in asyncio.all_tasks() if _source(task).startswith(folders)]


def _source(task: asyncio.Task[Any]) -> str:
    """The file a task's coroutine is written in; empty for foreign awaitables."""
    code = getattr(task.get_coro(), "cr_code", None)
    return code.co_filename if code else ""
