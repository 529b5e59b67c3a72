"""Tasks that live and fail together, and whose error the operator may have to read."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from core.errors import OperatorError


@asynccontextmanager
async def task_group() -> AsyncIterator[asyncio.TaskGroup]:
    """A TaskGroup that raises the OperatorError of its body or of a task as it is."""
    try:
        async with asyncio.TaskGroup() as tasks:
            yield tasks
    except BaseExceptionGroup as errors:
        mendable = errors.subgroup(OperatorError)
        if mendable is None:
            raise
        raise mendable.exceptions[0] from errors
