"""How much work a prompt is, how fast a rank does it, and what is queued on it. Pure.

Work is counted in *effective tokens*: a token of a long context costs more than one of a short
one, and each request has a fixed cost. A rank's speed turns work into seconds; it is learned.
"""

from __future__ import annotations

from dataclasses import dataclass

REQUEST_TOKENS = 64  # fixed cost of a request: scheduling, sampling, the rest of a batch
ATTENTION_TOKENS = 65536  # context at which attention costs as much as everything else (70B dense)
RUNNING_SLOWDOWN = 0.001  # of prefill, by each request that is generating in the same steps

FIRST_GUESS = 1e-3  # seconds for each effective token, until the first prompt was measured
FASTEST = 1e-7  # never 0, however coarse the clock: costs must stay comparable
HALF_LIFE_S = 60.0  # a measurement counts half after this long
GROUP_WEIGHT = 32768.0  # a rank's own measurements outweigh its group's after this much work


def work_of(prompt_tokens: int, cached_tokens: int) -> float:
    """Effective tokens of a prefill: what is not cached, attending to all that comes before."""
    own = prompt_tokens - cached_tokens
    return REQUEST_TOKENS + own * (1 + (cached_tokens + own / 2) / ATTENTION_TOKENS)


class Speed:
    """Seconds for each effective token: total time over total work, old measurements fading.

    A ratio of sums, not a mean of ratios: a step that ends two prompts at once measures 0 s for the
    second one, and the sums are still right.
    """

    def __init__(self, prior: Speed | None = None) -> None:
        self._prior = prior
        self._seconds = 0.0
        self._work = 0.0
        self._at = 0.0

    @property
    def seconds_per_token(self) -> float:
        if self._prior is None:
            return max(FASTEST, self._seconds / self._work) if self._work else FIRST_GUESS
        prior = self._prior.seconds_per_token
        return (self._seconds + GROUP_WEIGHT * prior) / (self._work + GROUP_WEIGHT)

    def measured(self, seconds: float, work: float, now: float) -> None:
        fade = 0.5 ** (max(0.0, now - self._at) / HALF_LIFE_S)
        self._seconds = self._seconds * fade + seconds
        self._work = self._work * fade + work
        self._at = now
        if self._prior is not None:
            self._prior.measured(seconds, work, now)


@dataclass(slots=True, eq=False)
class Prefill:
    """One prompt on its way to its first token."""

    tokens: int
    work: float
    sent_at: float


class PrefillQueue:
    """The prompts one router has sent to one rank and seen no first token of, oldest first."""

    def __init__(self, group: Speed) -> None:
        self.active = 0  # requests on the rank, queued or generating
        self.tokens = 0  # of the queued prompts, cached or not
        self.speed = Speed(group)
        self._queue: dict[Prefill, None] = {}
        self._work = 0.0
        self._last_first_token = 0.0

    @property
    def slowdown(self) -> float:
        return 1 + RUNNING_SLOWDOWN * (self.active - len(self._queue))

    def pending(self, now: float) -> float:
        """Effective tokens still to do. The oldest prompt is in work and shrinks with time."""
        oldest = next(iter(self._queue), None)
        if oldest is None:
            return 0.0
        since = max(oldest.sent_at, self._last_first_token)
        done = (now - since) / (self.speed.seconds_per_token * self.slowdown)
        return max(0.0, self._work - min(done, oldest.work))

    def sent(self, prefill: Prefill) -> None:
        self._queue[prefill] = None
        self._work += prefill.work
        self.tokens += prefill.tokens
        self.active += 1

    def first_token(self, prefill: Prefill, work: float, now: float) -> None:
        """Release the prompt, and learn from the time since the rank could begin with it.

        ``work`` is what it really was, now that the cached tokens are known.
        """
        slowdown = self.slowdown
        self._release(prefill)
        began = max(prefill.sent_at, self._last_first_token)
        self.speed.measured((now - began) / slowdown, work, now)
        self._last_first_token = now

    def left(self, prefill: Prefill) -> None:
        """The request is over, whether its first token came or not."""
        self.active -= 1
        if prefill in self._queue:
            self._release(prefill)

    def _release(self, prefill: Prefill) -> None:
        del self._queue[prefill]
        self._work = self._work - prefill.work if self._queue else 0.0
        self.tokens -= prefill.tokens
