"""The text of one request while it runs: its token streams side by side, as one iterator."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager

from core.errors import EngineError
from core.inbox import Inbox
from core.wire import FinishReason, TokenChunk
from router.choice import Choice
from router.meter import RequestMeter
from router.text.request import TextEvent, TextUsage

# Choices of a prompt this long wait for the first one's first token, and then find the prompt in
# the prefix cache; for shorter prompts the wait costs more than computing them again.
LEAD_PROMPT_TOKENS = 64

# What happens inside a TextStream: events, and the tasks that produced them, each when it is over;
# None: stop.
_Item = TextEvent | asyncio.Task[None] | None


class ChoiceStream:
    """One choice and the token stream it is read from, opened when it is first read."""

    def __init__(
        self,
        choice: Choice,
        open_tokens: Callable[[], AsyncIterator[TokenChunk]],
        *,
        leads: bool,
        lead: asyncio.Event,
    ) -> None:
        """``leads``: first of its prompt; the others start once ``lead`` is set."""
        self.choice = choice
        self.leads = leads
        self._open_tokens = open_tokens
        self._lead = lead

    @asynccontextmanager
    async def chunks(self) -> AsyncIterator[AsyncIterator[TokenChunk]]:
        """The token stream; leaving the block closes it, which aborts the request behind it."""
        if not self.leads:
            await self._lead.wait()
        tokens = self._open_tokens()
        try:
            yield tokens
        finally:
            self.let_others_start()
            if (close := getattr(tokens, "aclose", None)) is not None:
                await close()

    def let_others_start(self) -> None:
        """The prompt is in the prefix cache now, or never will be."""
        if self.leads:
            self._lead.set()


class TextStream:
    """Iterate over it once: each item holds all events that became known together.

    Raises what ended a token stream with an error; all other choices end with it. ``usage`` is
    never behind the events.
    """

    def __init__(
        self,
        choices: list[ChoiceStream],
        meter: RequestMeter,
        usage: TextUsage,
        *,
        timeout_s: float | None,
    ) -> None:
        """``timeout_s`` counts from the arrival of the request."""
        self.usage = usage
        self._choices = choices
        self._meter = meter
        self._timeout_s = timeout_s
        self._out_of_time = False
        self.cut = False  # ended by time or abort before every choice had ended
        self._inbox: Inbox[_Item] = Inbox()
        self._steps = self._run()

    @property
    def aborted(self) -> bool:
        """Whether it was left, or ran out of time, before every choice had ended."""
        return self.cut or self._unfinished

    @property
    def timed_out(self) -> bool:
        """Whether it was cut because its time was over."""
        return self.cut and self._out_of_time

    @property
    def finishes(self) -> list[FinishReason | None]:
        """Why each choice ended; None where it has not."""
        return [c.choice.finish for c in self._choices]

    @property
    def _unfinished(self) -> bool:
        return not all(c.choice.done for c in self._choices)

    def __aiter__(self) -> AsyncIterator[list[TextEvent]]:
        return self._steps

    def abort(self) -> None:
        """End it from outside: every choice that still runs ends with ABORT."""
        self._inbox.put(None)

    async def aclose(self) -> None:
        """Stop every token stream that still runs."""
        await self._steps.aclose()

    async def _run(self) -> AsyncGenerator[list[TextEvent], None]:
        tasks = [asyncio.create_task(self._pump(choice)) for choice in self._choices]
        for task in tasks:
            task.add_done_callback(self._inbox.put)
        running = len(tasks)
        timer = self._start_timer()
        try:
            while running:
                items = await self._inbox.take()
                ended = [item for item in items if isinstance(item, asyncio.Task)]
                if events := [item for item in items if isinstance(item, TextEvent)]:
                    yield events
                for task in ended:
                    task.result()  # raises what ended it
                running -= len(ended)
                if None in items:
                    self.cut = self._unfinished
                    break
        finally:
            if timer is not None:
                timer.cancel()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        if late := self._late():
            yield late

    def _start_timer(self) -> asyncio.TimerHandle | None:
        if self._timeout_s is None:
            return None
        left_s = self._timeout_s - self._meter.age_s
        return asyncio.get_running_loop().call_later(left_s, self._time_out)

    def _time_out(self) -> None:
        self._out_of_time = True
        self.abort()

    def _late(self) -> list[TextEvent]:
        """What came meanwhile, and a last event for each choice that had none."""
        events = [item for item in self._inbox.rest() if isinstance(item, TextEvent)]
        open_choices = [c.choice for c in self._choices if not c.choice.done]
        return events + [choice.end(FinishReason.ABORT) for choice in open_choices]

    async def _pump(self, stream: ChoiceStream) -> None:
        """Read one token stream to the end of its choice."""
        choice = stream.choice
        async with stream.chunks() as chunks:
            async for chunk in chunks:
                stream.let_others_start()
                before = choice.tokens
                event = choice.absorb(chunk)
                self._account(stream, chunk, choice.tokens - before)
                if event is not None:
                    self._inbox.put(event)
                if choice.done:
                    return
        raise EngineError(f"the token stream of choice {choice.index} ended without a reason")

    def _account(self, stream: ChoiceStream, chunk: TokenChunk, tokens: int) -> None:
        if tokens:
            self.usage.completion_tokens += tokens
            self._meter.tokens(stream.choice.index, tokens)
        # The other choices find the prompt which the first one left: that saved the caller nothing.
        if chunk.usage is not None and stream.leads:
            self.usage.cached_tokens += chunk.usage.cached_tokens
