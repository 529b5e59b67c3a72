"""Sequence: one request's life inside a worker, and its legal state changes.

Token and memory intervals of a sequence, all in tokens:

    0 ........ shared_len ........ computed_len ..... allocated_len
    |  tree's pages, locked  |  own pages, KV written |  own pages, empty |
    0 ............................ prompt_len ...... length
    |            prompt                 |      output     |

``shared_len`` and ``allocated_len`` are whole pages. The first tokens of the page at ``shared_len``
may count as computed while a step is still to copy them (``copied_by``; see worker/cache).

``length - computed_len`` tokens still want a forward pass: many during prefill (or after a
retraction), exactly one while decoding, because the last sampled token has no KV yet.

What steps in flight do is counted apart, until they are collected:

    computed_len ....... planned_len ....... reach
    |  ``flying``: KV being written  |  wanted by no step yet: ``remaining``  |
                               length ...... reach
                               |  ``pending``: being sampled, not known yet  |

With one step in flight ``pending`` is 0 or 1, and the next step takes a token that is known by its
row of the request table only (``StepPlan.late``).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

import numpy as np

from core.wire import FinishReason, Int32Array, SamplingParams, TokenLogprob, TokenRequest

if TYPE_CHECKING:
    from worker.cache.node import Node
    from worker.timeline import Timeline

NO_ROW = -1


class SequenceState(StrEnum):
    """Where a sequence is in its life."""

    WAITING = "waiting"  # owns no pages (unified, prefill: for a batch; decode: for pages)
    AWAITING_KV = "awaiting_kv"  # decode: pages reserved, the prefill rank may write them
    RUNNING = "running"  # takes part in steps
    SENDING = "sending"  # prefill: computed, pages held until the transport is done with them
    CLOSING = "closing"  # stream ended, pages held because a peer may still use them
    FINISHED = "finished"  # stream ended, every page given back


LEGAL: dict[SequenceState, frozenset[SequenceState]] = {
    SequenceState.WAITING: frozenset(
        {
            SequenceState.RUNNING,
            SequenceState.AWAITING_KV,
            SequenceState.CLOSING,
            SequenceState.FINISHED,
        }
    ),
    SequenceState.AWAITING_KV: frozenset(
        {SequenceState.RUNNING, SequenceState.CLOSING, SequenceState.FINISHED}
    ),
    SequenceState.RUNNING: frozenset(
        {
            SequenceState.WAITING,  # retracted
            SequenceState.SENDING,
            SequenceState.CLOSING,
            SequenceState.FINISHED,
        }
    ),
    SequenceState.SENDING: frozenset({SequenceState.CLOSING, SequenceState.FINISHED}),
    SequenceState.CLOSING: frozenset({SequenceState.FINISHED}),
    SequenceState.FINISHED: frozenset(),
}


@dataclass(slots=True, eq=False)
class Sequence:
    """Mutable; owned by the engine of one rank. Compared and hashed by identity."""

    request: TokenRequest
    router: str  # whose request it is
    tokens: Int32Array  # buffer; ``tokens[:length]`` are the ids
    length: int
    arrived_s: float = 0.0  # monotonic, for ages
    queued_s: float | None = None  # when the waiting queue first put it in order
    state: SequenceState = SequenceState.WAITING
    row: int = NO_ROW  # in the request table, while it owns pages
    node: Node | None = None  # deepest locked tree node: holds [0, shared_len)
    shared_len: int = 0
    computed_len: int = 0
    allocated_len: int = 0
    flying: int = 0  # tokens computed by steps in flight, after computed_len
    pending: int = 0  # tokens sampled by steps in flight, after length
    cached_len: int = 0  # of the prompt, found in the cache before the first retraction
    copied_by: int = 0  # the step that fills the page it shares in part; 0: none
    retractions: int = 0
    accounted: bool = False  # its usage was said
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)  # so far, where asked for
    timeline: Timeline | None = None  # where the request is traced

    @classmethod
    def of(cls, request: TokenRequest, router: str, context_len: int) -> Sequence:
        """A new sequence with room for every token it may ever have."""
        ids = request.ids()
        room = min(context_len, request.prompt_len + request.params.max_new_tokens)
        tokens = np.empty(max(room, len(ids)) + 1, dtype=np.int32)
        tokens[: len(ids)] = ids
        return cls(request, router, tokens, len(ids))

    @property
    def rid(self) -> str:
        return self.request.rid

    @property
    def room(self) -> int:
        return self.request.route.room

    @property
    def salt(self) -> str:
        """It shares cached pages only with sequences of the same salt."""
        return self.request.cache_salt

    @property
    def priority(self) -> int:
        """Higher goes first, and is retracted last."""
        return self.request.priority

    @property
    def params(self) -> SamplingParams:
        return self.request.params

    @property
    def ids(self) -> Int32Array:
        return self.tokens[: self.length]

    @property
    def planned_len(self) -> int:
        """Tokens with KV once the steps in flight are collected."""
        return self.computed_len + self.flying

    @property
    def reach(self) -> int:
        """Length once the steps in flight are collected."""
        return self.length + self.pending

    @property
    def remaining(self) -> int:
        """Tokens that still want a forward pass, and that no step in flight takes."""
        return self.length + self.pending - self.computed_len - self.flying

    @property
    def output_len(self) -> int:
        return self.length - self.request.prompt_len

    @property
    def generated_here(self) -> int:
        """Output tokens this rank sampled: what a retraction would have to recompute for."""
        return self.length - len(self.request.token_ids) // 4

    @property
    def unscored(self) -> bool:
        """Whether prompt tokens are still to be scored: those take logits, not cached KV."""
        wanted = self.params.prompt_logprobs is not None and not self.accounted
        return wanted and len(self.prompt_logprobs) < self.request.prompt_len - 1

    @property
    def reusable_len(self) -> int:
        """How many tokens a cached prefix may cover, when the sequence is to sample here."""
        return len(self.prompt_logprobs) if self.unscored else self.length - 1

    def append(self, token: int) -> None:
        self.tokens[self.length] = token
        self.length += 1

    def finish_reason(self, eos: frozenset[int], context_len: int) -> FinishReason | None:
        """Why the sequence ends at its last token, or None while it goes on."""
        last = int(self.tokens[self.length - 1])
        if last in self.params.stop_token_ids or (last in eos and not self.params.ignore_eos):
            return FinishReason.STOP
        if self.output_len >= self.params.max_new_tokens or self.length >= context_len:
            return FinishReason.LENGTH
        return None

    def move(self, to: SequenceState) -> None:
        assert to in LEGAL[self.state], f"{self.rid}: {self.state} -> {to} is not a legal move"
        self.state = to
