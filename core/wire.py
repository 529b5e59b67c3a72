"""The nouns that cross folders and processes: frozen, keyword-only, token ids only.

Text never appears here; it ends at the router. Token ids of a prompt travel as little-endian
int32 bytes (32,000 ids decode in 0.05 ms; a tuple of ints takes 2 ms).
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

import msgspec
import numpy as np
import numpy.typing as npt

from core.handoffs import HandoffReport

PROTOCOL_VERSION = 2

Int32Array = npt.NDArray[np.int32]


def pack_ids(ids: Sequence[int] | Int32Array) -> bytes:
    """Token ids as little-endian int32 bytes."""
    return np.asarray(ids, dtype="<i4").tobytes()


def unpack_ids(data: bytes) -> Int32Array:
    """The read-only array behind ``pack_ids``; length is ``len(data) // 4``."""
    return np.frombuffer(data, dtype="<i4")


class Role(StrEnum):
    """What a group of workers does."""

    PREFILL = "prefill"
    DECODE = "decode"
    UNIFIED = "unified"


class FinishReason(StrEnum):
    """Why a stream ended. Every stream ends with one."""

    STOP = "stop"  # a stop token, an end-of-sequence token or a stop string
    LENGTH = "length"  # max_new_tokens or the context length was reached
    ABORT = "abort"  # the caller went away or asked for it
    ERROR = "error"  # TokenChunk.error says what and who can act


class ErrorKind(StrEnum):
    """Who can act on the error that ended a stream; maps to one HTTP and one gRPC status."""

    INVALID = "invalid"  # the caller: the request can never work
    OVERLOADED = "overloaded"  # the caller, later: back-pressure
    UNAVAILABLE = "unavailable"  # the operator: a worker or its peer was lost
    INTERNAL = "internal"  # us: a defect


class RankId(msgspec.Struct, frozen=True, kw_only=True, order=True):
    """One attention rank: the unit that owns a KV cache and is routed to."""

    group: str
    replica: int = 0
    rank: int = 0

    def __str__(self) -> str:
        return f"{self.group}/{self.replica}/{self.rank}"

    @classmethod
    def parse(cls, text: str) -> RankId:
        """The inverse of ``str``; "group/replica" means rank 0. Raises ValueError."""
        group, replica, *rest = text.split("/")
        (rank,) = rest or ["0"]
        return cls(group=group, replica=int(replica), rank=int(rank))


class Incarnation(msgspec.Struct, frozen=True, kw_only=True):
    """One life of a rank's process. A restarted rank is another one, perhaps on the same port."""

    rank: RankId
    endpoint: str  # "host:port" of the rank's gRPC server
    nonce: str  # drawn at process start

    def __str__(self) -> str:
        return f"{self.rank}@{self.endpoint}#{self.nonce}"


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How to choose tokens and when to stop. Checked at the front door, trusted behind it."""

    max_new_tokens: int
    temperature: float = 1.0  # 0 is greedy
    top_p: float = 1.0  # in (0, 1]; 1 is off
    top_k: int = 0  # 0 is off
    min_p: float = 0.0  # least probability as a share of the best token's, in [0, 1]; 0 is off
    repetition_penalty: float = 1.0  # over prompt and output, above 0; 1 is off
    presence_penalty: float = 0.0  # over the output
    frequency_penalty: float = 0.0  # over the output, per occurrence
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, added to its logit)
    min_new_tokens: int = 0  # no stop token and no end of sequence before
    seed: int = 0  # the router draws one where the client gave none
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: bool = False  # of the chosen token
    top_logprobs: int = 0  # 0 to 20 alternatives; needs logprobs
    prompt_logprobs: int | None = None  # alternatives for each prompt token; None: do not score


class Route(msgspec.Struct, frozen=True, kw_only=True):
    """Where a request runs. Unified serving is the case ``prefill == decode``."""

    room: int  # random, 63 bits: the rendezvous of the two legs
    prefill: Incarnation
    decode: Incarnation

    @property
    def unified(self) -> bool:
        return self.prefill == self.decode


class TokenRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request behind the router. Both legs get the same one."""

    rid: str
    token_ids: bytes  # int32; the prompt, then what was generated earlier elsewhere
    prompt_len: int  # tokens of the prompt; output offset of the first new token is the rest
    params: SamplingParams
    route: Route
    cache_salt: str = ""  # requests share cached KV only where their salts are equal
    priority: int = 0  # higher is started first, and retracted last
    trace: str = ""  # W3C traceparent of the router's span for it; empty: not traced

    def ids(self) -> Int32Array:
        return unpack_ids(self.token_ids)


class TopLogprob(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """One alternative at one position."""

    token_id: int
    logprob: float


class TokenLogprob(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Natural-log probability of a chosen token, and its best alternatives, best first.

    Of the model's own distribution: before temperature, top-k and top-p.
    """

    logprob: float
    top: tuple[TopLogprob, ...] = ()


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """What one leg of a request cost; sent with the leg's first chunk."""

    prompt_tokens: int = 0
    cached_tokens: int = 0  # of the prompt, found in this leg's radix cache


# Begins what clients may read of a StreamError's message, to its end; all else is for the log.
KV_DIFFERS = "KV geometry differs"


class StreamError(msgspec.Struct, frozen=True, kw_only=True):
    """Why a stream failed, in words for the operator."""

    kind: ErrorKind
    message: str


class TokenChunk(msgspec.Struct, frozen=True, kw_only=True):
    """Some output tokens of one request from one leg.

    ``offset`` is the position of ``token_ids[0]`` in the request's output: two legs and a
    migrated stream may repeat offsets, and the router emits each once. A chunk with ``finish``
    is its leg's last. The prefill leg of a route with two workers ends with
    ``finish=None, last=True`` after the first token: the other leg goes on.
    """

    rid: str
    offset: int
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()  # as long as token_ids where asked for
    # of all prompt tokens but the first, with the first chunk, where asked for
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    finish: FinishReason | None = None
    last: bool = False
    usage: Usage | None = None
    error: StreamError | None = None


class LoadReport(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank says of itself with each step."""

    waiting_requests: int = 0
    waiting_tokens: int = 0  # prompt tokens not yet computed
    running_requests: int = 0
    handoff_requests: int = 0  # sending, or awaiting KV
    free_pages: int = 0
    cached_pages: int = 0  # held by the prefix cache alone: evictable
    total_pages: int = 0
    steps: int = 0
    prompt_tokens: int = 0  # counters since start, from here on
    cached_tokens: int = 0
    output_tokens: int = 0
    retractions: int = 0
    kv_bytes_sent: int = 0
    kv_bytes_received: int = 0
    busy_s: float = 0.0  # in steps; with ``steps``, the mean time of one
    stuck_steps: int = 0  # took longer than the watchdog allows
    page_repairs: int = 0  # accounts of KV pages that did not add up and were put right
    oldest_waiting_s: float = 0.0  # not counters: age of the request that waits longest
    last_step_s: float = 0.0

    @property
    def idle(self) -> bool:
        """No request is in any state."""
        return not (self.waiting_requests or self.running_requests or self.handoff_requests)


class RankInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank is; fixed for one incarnation."""

    incarnation: Incarnation
    role: Role
    model: str
    context_len: int  # tokens one request may have, prompt and output
    total_pages: int
    page_size: int  # tokens
    kv_bytes_per_token: int
    dtype: str
    attention: str
    threads: int
    pid: int
    transport: str = ""  # by which KV crosses, in words; empty: it does not


# --- session stream: router -> rank -----------------------------------------------------------


class Hello(msgspec.Struct, frozen=True, kw_only=True, tag="hello"):
    """First frame of a session; the rank answers Welcome or refuses the version."""

    version: int
    router: str  # one life of a router: a lost session aborts this router's requests


class Submit(msgspec.Struct, frozen=True, kw_only=True, tag="submit"):
    """Start a request."""

    request: TokenRequest


class Abort(msgspec.Struct, frozen=True, kw_only=True, tag="abort"):
    """Stop the request with exactly this id; unknown ids are ignored."""

    rid: str
    done: bool = False  # the router has all that it wants of it: nothing went wrong


class Ping(msgspec.Struct, frozen=True, kw_only=True, tag="ping"):
    """Ask for a report now: the liveness check of an idle session."""


ToRank = Hello | Submit | Abort | Ping

# --- session stream: rank -> router -----------------------------------------------------------


class Welcome(msgspec.Struct, frozen=True, kw_only=True, tag="welcome"):
    """First frame of a session from a rank."""

    version: int
    info: RankInfo


class StepReport(msgspec.Struct, frozen=True, kw_only=True, tag="step"):
    """All that one step produced for one router, in one message."""

    chunks: tuple[TokenChunk, ...]
    load: LoadReport
    transfers: HandoffReport | None = None  # in the answer to a Ping


ToRouter = Welcome | StepReport


# --- control ------------------------------------------------------------------------------------


class PageAccount(msgspec.Struct, frozen=True, kw_only=True):
    """Where every page is. ``free + cached + owned == total``, or pages leaked."""

    total: int
    free: int
    cached: int  # in the prefix cache, locked or not
    owned: int  # by sequences and handoffs alone

    @property
    def whole(self) -> bool:
        return self.free + self.cached + self.owned == self.total


class RankStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A rank's answer to ``antiphon status``."""

    info: RankInfo
    load: LoadReport
    pages: PageAccount
    handoffs: dict[str, int]  # phase -> number of rooms
    uptime_s: float
    transfers: HandoffReport | None = None  # None: a unified rank
