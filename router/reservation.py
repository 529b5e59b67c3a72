"""What one attempt of a request holds on its replicas, and gives back on every way out."""

from __future__ import annotations

from core.wire import Int32Array, Usage
from router.policy.base import Ticket
from router.replicas import Replica


class Reservation:
    """A route with the work booked on it: the same replica twice where it does both.

    Prompt tokens are booked on the prefill replica until the first token, prompt and expected
    output on the decode replica until the end. Each replica has a ticket of the policy that chose
    it; a unified one has a single ticket for both jobs.
    """

    def __init__(
        self,
        prefill: tuple[Replica, Ticket],
        decode: tuple[Replica, Ticket] | None,
        *,
        prompt_tokens: int,
        output_tokens: int,
    ) -> None:
        self.prefill, self._prefill_ticket = prefill
        self.decode = self.prefill if decode is None else decode[0]
        self._decode_ticket = None if decode is None else decode[1]
        self._prefill_work = self.prefill.book(prompt_tokens)
        self._decode_work = self.decode.book(prompt_tokens + output_tokens)
        self._started = False

    @property
    def legs(self) -> tuple[Replica, ...]:
        return (self.prefill,) if self._decode_ticket is None else (self.prefill, self.decode)

    @property
    def expected_tokens(self) -> int | None:
        """Of the prompt, thought to be in the prefill replica's cache; None: nobody knows."""
        return self._prefill_ticket.expected_tokens

    def first_token(self, usage: Usage | None, *, local: bool = False) -> None:
        """The prompt is computed; calls after the first one change nothing.

        ``local`` when the decode replica did it: then the prefill replica may hold nothing of it.
        """
        if self._started:
            return
        self._started = True
        self._prefill_work.release()
        found = None if usage is None else usage.cached_tokens
        if self._decode_ticket is None:
            self._prefill_ticket.started(found)
            return
        if not local:
            self._prefill_ticket.started(found)
        self._prefill_ticket.ended(None)
        self._decode_ticket.started(found if local else None)

    def release(self, token_ids: Int32Array) -> None:
        """Give everything back, once; ``token_ids`` are the prompt and the output so far."""
        self._prefill_work.release()
        self._decode_work.release()
        computed = token_ids if self._started else None
        if self._decode_ticket is None:
            self._prefill_ticket.ended(computed)
            return
        if not self._started:
            self._prefill_ticket.ended(None)
        self._decode_ticket.ended(computed)
