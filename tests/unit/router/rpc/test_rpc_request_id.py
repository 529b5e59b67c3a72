"""An id that a gRPC client chose is found in the log and in the trace, beside the server's own."""

from __future__ import annotations

import logging

from tests.support.doors import http_client, make_door, services
from tests.support.eventually import run_tidy
from tests.support.fake_streams import FakeStreams, says
from tests.support.http_calls import TEXT
from tests.support.rpc_calls import Client, all_of, asks, call
from tests.support.spans import Traced, named

FORGED = "mine\nERROR router: on fire\u2028"
ATTRIBUTE = "antiphon.client.request_id"


def test_one_record_and_the_span_have_both_ids(caplog):
    caplog.set_level(logging.INFO)
    traced = Traced()

    async def use(client: Client) -> str:
        await all_of(client.stub.Generate(asks(request_id=FORGED)))
        await all_of(client.stub.Generate(asks()))
        return client.streams.calls[0].rid

    rid = call(use, says("ok"), tracer=traced.tracer)
    (record,) = [r for r in caplog.records if "calls it" in r.getMessage()]
    assert record.rid == rid
    assert record.getMessage() == f"its client calls it {FORGED!r}"
    assert len(record.getMessage().splitlines()) == 1
    ids = {span.attributes["antiphon.rid"]: span.attributes.get(ATTRIBUTE)
           for span in traced.spans() if span.kind == "server"}  # fmt: skip
    assert ids.pop(rid) == FORGED
    assert list(ids.values()) == [None]


def test_over_http_the_span_has_it_too():
    traced = Traced()

    async def main() -> None:
        door = make_door(FakeStreams(says("ok")), tracer=traced.tracer)
        async with http_client(services(door)) as client:
            headers = {"x-request-id": "mine"}
            assert (await client.post("/v1/completions", json=TEXT, headers=headers)).is_success

    run_tidy(main)
    assert named(traced.spans(), "text_completion").attributes[ATTRIBUTE] == "mine"
