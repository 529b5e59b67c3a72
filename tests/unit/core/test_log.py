"""One line per record, with component and request."""

from __future__ import annotations

import io
import json
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


def test_a_record_of_the_router_names_the_attempt_that_ranks_know(root):
    stream = io.StringIO()
    log.setup("router", "info", stream)
    logging.getLogger("router.live").info("goes", extra={"rid": "r", "attempt": "r.0"})
    assert "INFO    router rid=r attempt=r.0 router.live: goes" in stream.getvalue()


def test_json_is_one_object_a_line_even_with_an_exception(root):
    stream = io.StringIO()
    log.setup("decode/0/0", "info", stream, style="json")
    logger = logging.getLogger("worker.loop")
    logger.info('say "%s"', "ä\n", extra={"rid": "r1"})
    try:
        raise ZeroDivisionError("a defect")
    except ZeroDivisionError:
        logger.exception("died")
    said, died = map(json.loads, stream.getvalue().splitlines())
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", said.pop("time"))
    assert said == {
        "level": "INFO",
        "component": "decode/0/0",
        "rid": "r1",
        "logger": "worker.loop",
        "message": 'say "ä\n"',
    }
    assert "rid" not in died
    assert died["exception"].endswith("ZeroDivisionError: a defect")
