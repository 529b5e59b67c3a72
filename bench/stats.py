"""Outcomes -> numbers: percentiles, throughput, goodput. Pure."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

import msgspec
import numpy as np

from bench.config import Targets
from bench.outcome import Outcome

GAP_PERCENTILE = 99  # of the gaps within a request, for the ITL target
_NUMBERS = re.compile(r"(?<!HTTP )\b\d+")  # in an error, but not its status


class Spread(msgspec.Struct, frozen=True, kw_only=True):
    """How a quantity is distributed. Milliseconds."""

    mean: float
    p50: float
    p90: float
    p99: float


class Goodput(msgspec.Struct, frozen=True, kw_only=True):
    """Requests that met every target."""

    requests: int
    share: float  # of all requests, failed ones included
    per_s: float


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a run. Latencies and tokens are of requests that went well; None: unknown."""

    requests: int
    ok: int
    failed: int
    errors: dict[str, int]
    duration_s: float  # from the first request sent to the last end
    requests_per_s: float
    in_flight: float  # on average
    prompt_tokens: int | None
    cached_share: float | None  # of the prompt tokens, where the server tells
    output_tokens: int
    output_tokens_from: str  # "usage", or "chunks" where the server sends none
    output_tokens_per_s: float
    total_tokens_per_s: float | None
    ttft_ms: Spread | None
    tpot_ms: Spread | None
    itl_ms: Spread | None
    e2e_ms: Spread | None
    goodput: Goodput | None  # None: no target was given
    late_p99_ms: float  # how late the load generator sent


def summarise(outcomes: Sequence[Outcome], targets: Targets) -> Summary:
    """All numbers of a run; there must be an outcome."""
    ok = [outcome for outcome in outcomes if outcome.ok]
    duration_s = max(o.end_s for o in outcomes) - min(o.start_s for o in outcomes)
    per_s = 1 / duration_s if duration_s > 0 else 0.0
    prompt = _known([o.prompt_tokens for o in ok])
    output = sum(o.output_tokens for o in ok)
    return Summary(
        requests=len(outcomes),
        ok=len(ok),
        failed=len(outcomes) - len(ok),
        errors=_errors([o.error for o in outcomes if o.error is not None]),
        duration_s=duration_s,
        requests_per_s=len(ok) * per_s,
        in_flight=sum(o.e2e_s for o in outcomes) * per_s,
        prompt_tokens=prompt,
        cached_share=_cached_share(ok),
        output_tokens=output,
        output_tokens_from=("chunks" if any(o.completion_tokens is None for o in ok) else "usage"),
        output_tokens_per_s=output * per_s,
        total_tokens_per_s=None if prompt is None else (prompt + output) * per_s,
        ttft_ms=spread([o.ttft_s for o in ok]),
        tpot_ms=spread([o.tpot_s for o in ok if o.tpot_s is not None]),
        itl_ms=spread([gap for o in ok for gap in o.itl_s]),
        e2e_ms=spread([o.e2e_s for o in ok]),
        goodput=_goodput(outcomes, targets, per_s),
        late_p99_ms=1e3 * float(np.percentile([o.lag_s for o in outcomes], 99)),
    )


def spread(seconds: Sequence[float]) -> Spread | None:
    """Mean and percentiles in milliseconds (linear between ranks); None of nothing."""
    if not seconds:
        return None
    values = 1e3 * np.asarray(seconds)
    p50, p90, p99 = (float(value) for value in np.percentile(values, (50, 90, 99)))
    return Spread(mean=float(values.mean()), p50=p50, p90=p90, p99=p99)


def is_good(outcome: Outcome, targets: Targets) -> bool:
    """Did it end well and meet every target? What an answer has too few tokens for is met."""
    if not outcome.ok:
        return False
    gaps = outcome.itl_s
    checks = (
        (outcome.ttft_s, targets.ttft_ms),
        (outcome.tpot_s, targets.tpot_ms),
        (float(np.percentile(gaps, GAP_PERCENTILE)) if gaps else None, targets.itl_ms),
    )
    return all(
        seconds is None or limit_ms is None or 1e3 * seconds <= limit_ms
        for seconds, limit_ms in checks
    )


def _goodput(outcomes: Sequence[Outcome], targets: Targets, per_s: float) -> Goodput | None:
    if targets == Targets():
        return None
    good = sum(is_good(outcome, targets) for outcome in outcomes)
    return Goodput(requests=good, share=good / len(outcomes), per_s=good * per_s)


def _errors(texts: Sequence[str]) -> dict[str, int]:
    """How often each text came, most often first; those that differ in numbers are one."""
    counts = Counter(_NUMBERS.sub("#", text) for text in texts)
    examples = {_NUMBERS.sub("#", text): text for text in reversed(texts)}
    return {examples[kind]: count for kind, count in counts.most_common()}


def _cached_share(outcomes: Sequence[Outcome]) -> float | None:
    """Over the requests whose usage has both counts: servers leave out a zero."""
    prompt = _known([o.prompt_tokens for o in outcomes])
    cached = [o.cached_tokens for o in outcomes if o.cached_tokens is not None]
    return sum(cached) / prompt if prompt and cached else None


def _known(counts: Sequence[int | None]) -> int | None:
    """The sum; None where a part of it is unknown."""
    known = [count for count in counts if count is not None]
    return sum(known) if known and len(known) == len(counts) else None
