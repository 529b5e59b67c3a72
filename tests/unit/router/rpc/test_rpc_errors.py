"""Every way a call can fail: code, reason, field, and when to come back."""

from __future__ import annotations

import asyncio
import math
import re

import grpc
import pytest

from core.errors import RequestError
from core.metrics import PrometheusSink
from core.wire import ErrorKind
from router.rpc import errors
from router.rpc.gen import antiphon_pb2 as pb
from tests.support.eventually import eventually
from tests.support.fake_streams import HANG, chunk, failure, says
from tests.support.rpc_calls import Client, all_of, asks, call, details_of, fails, says_hi

Code = grpc.StatusCode
INFO, FIELD, RETRY = "google.rpc.ErrorInfo", "google.rpc.BadRequest", "google.rpc.RetryInfo"


def reason_of(error: grpc.aio.AioRpcError) -> str:
    info = details_of(error)[INFO]
    assert info.domain == "antiphon"
    return info.reason


@pytest.mark.parametrize(
    ("request_", "field", "words"),
    [
        (pb.GenerateRequest(), "prompt", "set text or token_ids"),
        (asks(""), "prompt", "empty"),
        (pb.GenerateRequest(token_ids=pb.TokenIds(ids=[258])), "prompt", r"\[0, 258\)"),
        (pb.GenerateRequest(token_ids=pb.TokenIds(ids=[2**32 - 1])), "prompt", "4294967295"),
        (asks(n=0), "options.n", "between 1 and 128"),
        (asks(n=129), "options.n", "between 1 and 128"),
        (asks(max_tokens=0), "options.max_tokens", "at least 1"),
        (asks(temperature=-1), "options.temperature", "between 0 and 2"),
        (asks(temperature=2.1), "options.temperature", "between 0 and 2"),
        (asks(temperature=math.nan), "options.temperature", "is NaN"),
        (asks(temperature=math.inf), "options.temperature", "between 0 and 2"),
        (asks(top_p=0), "options.top_p", "above 0"),
        (asks(top_logprobs=1), "options.top_logprobs", "needs logprobs"),
        (asks(logprobs=True, top_logprobs=21), "options.top_logprobs", "between 0 and 20"),
        (asks(stop=[""]), "options.stop", "empty string"),
        (asks(stop=["x"] * 17), "options.stop", "at most 16"),
        (asks(stop_token_ids=[1] * 1025), "options.stop_token_ids", "at most 1024"),
        (asks(request_id="x" * 129), "options.request_id", "128 characters"),
        (pb.ChatRequest(), "messages", "give at least one"),
        (
            pb.ChatRequest(messages=[pb.ChatMessage(role="oracle", content="hi")]),
            "messages[0].role",
            "'oracle'",
        ),
    ],
)
def test_a_request_that_can_never_work_names_the_field(request_, field, words):
    error = fails(request_, Code.INVALID_ARGUMENT)
    assert reason_of(error) == "INVALID_REQUEST"
    (violation,) = details_of(error)[FIELD].field_violations
    assert (violation.field, violation.description) == (field, error.details())
    with pytest.raises(AssertionError, match=words):
        raise AssertionError(error.details())


def test_a_template_argument_that_clashes():
    request = says_hi()
    request.chat_template_kwargs.update({"messages": []})
    error = fails(request, Code.INVALID_ARGUMENT)
    assert details_of(error)[FIELD].field_violations[0].field == "chat_template_kwargs"


def test_a_prompt_beyond_the_context_has_a_reason_of_its_own():
    error = fails(asks("x" * 50), Code.INVALID_ARGUMENT, context_len=50)
    assert reason_of(error) == "CONTEXT_LENGTH_EXCEEDED"
    assert "maximum context length is 50" in error.details()


def test_a_model_without_a_template():
    error = fails(says_hi(), Code.INVALID_ARGUMENT, template=None)
    assert "no chat template" in error.details()


def test_another_model_is_not_found():
    error = fails(asks(model="gpt"), Code.NOT_FOUND)
    assert reason_of(error) == "MODEL_NOT_FOUND"
    assert details_of(error)[FIELD].field_violations[0].field == "options.model"


def test_too_many_requests_are_told_when_to_come_back():
    async def use(client: Client) -> grpc.aio.AioRpcError:
        running = client.stub.Generate(asks())
        await eventually(lambda: client.streams.calls)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await all_of(client.stub.Generate(asks()))
        running.cancel()
        return caught.value

    error = call(use, lambda _: [HANG], limit=1)
    assert error.code() is Code.RESOURCE_EXHAUSTED
    assert dict(error.trailing_metadata())["retry-after"] == "1"
    assert details_of(error)[RETRY].retry_delay.seconds == 1
    assert reason_of(error) == "OVERLOADED"


@pytest.mark.parametrize(
    ("raised", "code", "reason"),
    [
        (failure(ErrorKind.UNAVAILABLE, "decode/0 is gone"), Code.UNAVAILABLE, "UNAVAILABLE"),
        (failure(ErrorKind.INTERNAL, "a defect"), Code.INTERNAL, "INTERNAL_ERROR"),
        (failure(ErrorKind.OVERLOADED, "room 7"), Code.RESOURCE_EXHAUSTED, "OVERLOADED"),
        (failure(ErrorKind.INVALID, "room 7"), Code.INVALID_ARGUMENT, "INVALID_REQUEST"),
    ],
)
@pytest.mark.parametrize("after_text", [False, True])
def test_what_a_worker_says_has_a_status_and_the_id_under_which_the_log_says_more(
    raised, code, reason, after_text, caplog
):
    before = [chunk(0, 65)] if after_text else []
    error = fails(asks(), code, lambda _: [*before, raised])
    assert raised.error.message not in error.details()
    (found,) = re.findall(r"\(request id (grpc-\w+)\)$", error.details())
    logged = [r.getMessage() for r in caplog.records if getattr(r, "rid", "") == found]
    assert raised.error.message in "".join(logged)
    assert reason_of(error) == reason


def test_the_text_before_an_error_is_delivered():
    async def use(client: Client) -> str:
        stream = client.stub.Generate(asks())
        text = (await stream.read()).choices[0].text
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stream.read()
        assert caught.value.code() is Code.UNAVAILABLE
        return text

    lost = failure(ErrorKind.UNAVAILABLE, "lost")
    assert call(use, lambda _: [chunk(0, 65), lost]) == "A"


def test_a_defect_of_ours_tells_nothing_of_our_insides(caplog):
    def broken(_):
        raise ZeroDivisionError("secret")

    error = fails(asks(), Code.INTERNAL, broken)
    assert error.details().startswith("internal error: the server's log says more (request id ")
    assert "secret" in caplog.text


def test_a_long_message_fits_into_the_trailers():
    def broken(_):
        raise RequestError("é" * 100_000)

    error = fails(asks(), Code.INVALID_ARGUMENT, broken)
    assert error.details().endswith("é...")
    assert reason_of(error) == "INVALID_REQUEST"


def test_a_request_larger_than_the_limit():
    error = fails(asks("x" * 2**20), Code.RESOURCE_EXHAUSTED)
    assert "larger than max" in error.details()


def test_an_unpaired_surrogate_in_a_message_is_escaped():
    assert errors.describe(RequestError("\ud800")).message == "\\ud800"


def test_the_same_numbers_as_over_http():
    sink = PrometheusSink()

    async def use(client: Client) -> None:
        await all_of(client.stub.Generate(asks()))
        with pytest.raises(grpc.aio.AioRpcError):
            await all_of(client.stub.Generate(asks(n=0)))
        client.streams.script = lambda _: [HANG]
        stream = client.stub.Generate(asks())
        await eventually(lambda: len(client.streams.calls) == 2)
        stream.cancel()
        await eventually(lambda: client.door.running == 0)
        await asyncio.gather(stream.wait_for_connection(), return_exceptions=True)

    call(use, says("ok"), sink=sink)
    page = sink.render().decode()
    for status in ("ok", "invalid", "aborted"):
        assert f'antiphon_requests_total{{status="{status}"}} 1.0' in page
    assert "antiphon_requests_running 0.0" in page
