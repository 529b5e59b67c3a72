"""Names and channel settings that both ends of the worker RPC share.

gRPC frames carry msgpack of ``core.wire`` structs; there is no second schema. A session starts
with Hello and Welcome, which carry the protocol version.
"""

from __future__ import annotations

SERVICE = "antiphon.Worker"
SESSION = "Session"  # bidirectional, wire.ToRank -> wire.ToRouter: one message per engine step
PEER = "Peer"  # bidirectional, PeerHello and then opaque frames, both ways
STATUS = "Status"  # unary, empty -> wire.RankStatus, from the step loop
DUMP = "Dump"  # unary, empty -> dump.RankDump, with or without the step loop
LEASE = "Lease"  # unary, lease.Renewal -> lease.Health, without the step loop

STOPPING = "the rank is stopping"  # why its sessions and links end, where that is in order

MAX_MESSAGE_BYTES = 64 * 2**20

Options = tuple[tuple[str, int], ...]

_COMMON: Options = (
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    # a cut link with nothing to send is noticed after 10 + 5 s; our own heartbeats are quicker
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
)
SERVER_OPTIONS: Options = (
    *_COMMON,
    ("grpc.so_reuseport", 0),  # two ranks on one port would share its connections
    ("grpc.http2.min_ping_interval_without_data_ms", 1_000),
    ("grpc.http2.max_ping_strikes", 0),
)
CHANNEL_OPTIONS: Options = (
    *_COMMON,
    ("grpc.enable_http_proxy", 0),  # ranks are reached directly, loopback above all
    # every channel has its own connection: a new life never inherits an old one's back-off
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
)


def path(method: str) -> str:
    """The full name of one method, as a client calls it."""
    return f"/{SERVICE}/{method}"
