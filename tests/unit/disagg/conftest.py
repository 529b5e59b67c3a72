"""Two sides of handoffs on one hub."""

from __future__ import annotations

import pytest

from disagg.transport.inproc import Hub
from tests.support.handoff_sides import Decode, Prefill


@pytest.fixture
def hub():
    return Hub()


@pytest.fixture
def prefill(hub):
    return Prefill(hub)


@pytest.fixture
def decode(hub):
    return Decode(hub)
