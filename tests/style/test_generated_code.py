"""The checked-in protobuf code is what the compiler makes of the .proto now."""

from __future__ import annotations

import pytest

from router.rpc import generate
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


def test_every_field_and_method_is_new_to_nobody():
    """Numbers of version 1 are for ever: what is in use may not move."""
    from router.rpc.gen import antiphon_pb2

    numbers = {
        name: {field.name: field.number for field in message.fields}
        for name, message in antiphon_pb2.DESCRIPTOR.message_types_by_name.items()
    }
    assert numbers["GenerateRequest"] == {"text": 1, "token_ids": 2, "options": 3}
    assert numbers["GenerateResponse"] == {"request_id": 1, "choices": 2, "usage": 3}
    assert numbers["ChoiceDelta"] == {
        "index": 1,
        "text": 2,
        "token_ids": 3,
        "logprobs": 4,
        "finish_reason": 5,
        "matched_stop": 6,
        "matched_token_id": 7,
    }
