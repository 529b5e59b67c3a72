"""Servers that several tests share: Ray starts once for each."""

import pytest

from tests.support.served import serving


@pytest.fixture(scope="session")
def smollm():
    """The preset cpu as it is: Ray, a prefill and a decode rank, Mooncake, SmolLM2."""
    with serving() as served:
        yield served
