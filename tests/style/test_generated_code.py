"""The checked-in protobuf code is what the compiler makes of the .proto now."""

from __future__ import annotations

import pytest

from router.rpc import generate
from router.rpc.gen import antiphon_pb2
from tests.support import source


def test_the_generated_code_is_not_stale(tmp_path):
    pytest.importorskip("grpc_tools", reason="grpcio-tools is not installed")
    generate.write(tmp_path)
    written = {
        path.name: path.read_text("utf-8") for path in (tmp_path / generate.PACKAGE).iterdir()
    }
    kept = {path.name: path.read_text("utf-8") for path in source.GENERATED.glob("*_pb2*.py*")}
    assert kept == written, "run: make proto"
    assert set(kept) == {"antiphon_pb2.py", "antiphon_pb2.pyi", "antiphon_pb2_grpc.py"}


V1 = {
    "GenerateRequest": {"text": 1, "token_ids": 2, "options": 3},
    "ChatRequest": {"messages": 1, "options": 2, "chat_template_kwargs": 3},
    "GenerateResponse": {"request_id": 1, "choices": 2, "usage": 3},
    "ChoiceDelta": {
        "index": 1,
        "text": 2,
        "token_ids": 3,
        "logprobs": 4,
        "finish_reason": 5,
        "matched_stop": 6,
        "matched_token_id": 7,
    },
}


@pytest.mark.parametrize("name", V1)
def test_field_numbers_of_version_1_stay(name):
    message = antiphon_pb2.DESCRIPTOR.message_types_by_name[name]
    numbers = {field.name: field.number for field in message.fields}
    assert numbers.items() >= V1[name].items()
