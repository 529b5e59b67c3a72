"""One line per record, with component and request."""

from __future__ import annotations

import io
import logging
import re

import pytest

from core import log


@pytest.fixture
def root():
    """The root logger, put back as it was."""
    logger = logging.getLogger()
    handlers, level = logger.handlers[:], logger.level
    yield logger
    logger.handlers[:] = handlers
    logger.setLevel(level)


def test_a_line_says_when_how_who_which_and_what(root):
    stream = io.StringIO()
    log.setup("decode/0/0", "info", stream)
    logging.getLogger("worker.engine").info("step %d", 7, extra={"rid": "r1"})
    logging.getLogger("worker.engine").warning("no request")
    logging.getLogger("worker.engine").debug("too much")
    first, second = stream.getvalue().splitlines()
    time = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z"
    assert re.fullmatch(rf"{time} INFO    decode/0/0 rid=r1 worker\.engine: step 7", first)
    assert re.fullmatch(rf"{time} WARNING decode/0/0 worker\.engine: no request", second)


def test_a_second_setup_replaces_the_first(root):
    first, second = io.StringIO(), io.StringIO()
    log.setup("router", stream=first)
    log.setup("router", stream=second)
    logging.getLogger("router").info("once")
    assert first.getvalue() == ""
    assert second.getvalue().count("once") == 1


def test_an_unknown_level_is_refused(root):
    with pytest.raises(ValueError, match="LOUD"):
        log.setup("router", "loud")
