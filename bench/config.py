"""What one run of the benchmark does: the command line's answer, and the head of its JSON line."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from core.errors import ConfigError


class Targets(msgspec.Struct, frozen=True, kw_only=True):
    """What a request has to keep to count as good; None: not looked at. Milliseconds."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None
    itl_ms: float | None = None  # for the 99th percentile of the gaps within the request


class BenchConfig(msgspec.Struct, frozen=True, kw_only=True):
    """One run. Lengths are tokens (of synthetic text: words)."""

    # where
    url: str = "http://127.0.0.1:8000"
    model: str = ""  # empty: the first that /v1/models names
    endpoint: Literal["completions", "chat"] = "completions"
    prompt_format: Literal["text", "ids"] = "text"
    id_range: tuple[int, int] = (256, 4000)  # [low, high) of ids: no special tokens, any vocabulary
    timeout_s: float = 600.0
    temperature: float = 0.0
    ignore_eos: bool = True
    extra_body: dict[str, Any] = {}  # opaque: merged into every request

    # what
    workload: Literal["random", "shared-prefix", "multi-turn", "trace"] = "random"
    trace: str = ""  # .jsonl: Mooncake; .csv: Azure
    requests: int | None = None  # None: 64, or the whole trace
    input_tokens: int = 256  # new in every request
    output_tokens: int = 64
    spread: float = 0.0  # lengths are even in [1 - spread, 1 + spread] times the above
    prefix_tokens: int = 1024
    prefixes: int = 8
    turns: int = 6
    length_scale: float = 1.0  # of a trace's lengths, shared blocks included
    seed: int = 0

    # when: at most one of rate and concurrency
    rate: float | None = None  # arrivals a second, Poisson
    concurrency: int | None = None  # always so many in flight
    speed: float = 1.0  # of a trace's own times
    warmup: int = 1

    targets: Targets = Targets()
    label: str = ""

    def __post_init__(self) -> None:
        _require(
            self.url.startswith(("http://", "https://")),
            "--url: an address begins with http:// or https://",
        )
        _require(
            (self.workload == "trace") == bool(self.trace),
            "--workload trace and --trace FILE: both",
        )
        _require(self.rate is None or self.concurrency is None, "give --rate or --concurrency")
        _require(self.rate is None or self.rate > 0, "--rate must be positive")
        _require(self.concurrency is None or self.concurrency > 0, "--concurrency must be positive")
        _require(self.speed > 0 and self.length_scale > 0, "--speed, --length-scale: above 0")
        _require(0 <= self.spread < 1, "--spread must be in [0, 1)")
        _require(self.requests is None or self.requests > 0, "--requests must be positive")
        _require(min(self.input_tokens, self.output_tokens) > 0, "lengths must be positive")
        _require(min(self.prefixes, self.turns) > 0, "--prefixes and --turns must be positive")
        _require(min(self.prefix_tokens, self.warmup) >= 0, "--prefix-tokens, --warmup: 0 or more")
        _require(self.timeout_s > 0, "--timeout must be positive")
        _require(0 <= self.id_range[0] < self.id_range[1], "--id-range: LOW below HIGH")
        if self.prompt_format == "ids":
            _require(self.endpoint == "completions", "chat takes text: --prompt-format text")
            _require(
                self.workload != "multi-turn",
                "multi-turn appends the answer's text: --prompt-format text",
            )


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise ConfigError(f"bench: {message}")
