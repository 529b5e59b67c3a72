"""What one request may ask for: the rules that every front shares, with the field at fault."""

from __future__ import annotations

import math
from collections.abc import Iterable

from core.errors import RequestError
from core.wire import SamplingParams
from router.text.request import (
    DEFAULT_TERMS,
    MAX_BIASES,
    MAX_CHOICES,
    MAX_PRIORITY,
    MAX_SALT_CHARS,
    MAX_STOP_TOKENS,
    MAX_STOPS,
    MAX_TOP_LOGPROBS,
    ServedModel,
    Terms,
    TextRequest,
)

# Whether the rule holds, the field, what the field must be.
_Rule = tuple[bool, str, str]

_REALS = (
    "temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
)  # fmt: skip
_TEMPERATURE = (0.0, 2.0)
_PENALTY = (-2.0, 2.0)
_REPETITION = (0.01, 100.0)  # what is further out turns a float32 logit into infinity
_BIAS = (-100.0, 100.0)


def check(request: TextRequest, model: ServedModel, terms: Terms = DEFAULT_TERMS) -> None:
    """Raise RequestError for the first rule that the request breaks."""
    sampling, vocab = request.sampling, model.vocab_size
    groups = (
        _of_request(request),
        _of_operator(request, terms),
        _of_choosing(sampling),
        _of_tokens(sampling, vocab),
    )
    for rules in groups:
        _require(rules)


def check_sampling(sampling: SamplingParams) -> None:
    """Raise RequestError for the first rule on how a token is chosen that it breaks."""
    _require(_of_choosing(sampling))


def _require(rules: Iterable[_Rule]) -> None:
    for holds, param, message in rules:
        if not holds:
            raise RequestError(f"{param} {message}", param=param)


def _of_request(request: TextRequest) -> Iterable[_Rule]:
    limit = request.max_new_tokens
    yield bool(request.prompts), "prompt", "must not be an empty list"
    yield 1 <= request.n <= MAX_CHOICES, "n", f"must be between 1 and {MAX_CHOICES}"
    if request.echo:
        yield limit is None or limit >= 0, "max_tokens", "must be at least 0"
    else:
        yield limit is None or limit >= 1, "max_tokens", "must be at least 1, or 0 with echo"
    yield all(request.stops), "stop", "must not contain an empty string"
    yield len(request.stops) <= MAX_STOPS, "stop", f"must have at most {MAX_STOPS} strings"
    salt = request.cache_salt
    yield (
        len(salt) <= MAX_SALT_CHARS,
        "cache_salt",
        f"must have at most {MAX_SALT_CHARS} characters",
    )
    yield (
        abs(request.priority) <= MAX_PRIORITY,
        "priority",
        f"must be between {-MAX_PRIORITY} and {MAX_PRIORITY}",
    )
    yield not any("\ud800" <= c <= "\udfff" for c in salt), "cache_salt", "is not valid Unicode"


def _of_operator(request: TextRequest, terms: Terms) -> Iterable[_Rule]:
    choices, most = len(request.prompts) * request.n, terms.max_choices
    wish = f"asks for {choices} choices in all, and this server makes {most} (router.max_choices)"
    yield choices <= most, "prompt" if request.n == 1 else "n", wish
    limit = terms.max_output_tokens
    asked = request.max_new_tokens or 0
    message = f"must be at most {limit} (router.max_output_tokens)"
    yield not limit or asked <= limit, "max_tokens", message


def _of_choosing(sampling: SamplingParams) -> Iterable[_Rule]:
    """How a token is chosen. Each comparison is false for NaN."""
    for name in _REALS:
        yield not math.isnan(getattr(sampling, name)), name, "is NaN: it must be a number"
    yield _within("temperature", sampling.temperature, _TEMPERATURE)
    yield 0 < sampling.top_p <= 1, "top_p", "must be above 0 and at most 1"
    yield sampling.top_k >= 0, "top_k", "must be 0 (off) or more"
    yield 0 <= sampling.min_p <= 1, "min_p", "must be between 0 (off) and 1"
    yield _within("repetition_penalty", sampling.repetition_penalty, _REPETITION)
    yield _within("presence_penalty", sampling.presence_penalty, _PENALTY)
    yield _within("frequency_penalty", sampling.frequency_penalty, _PENALTY)
    yield _within("top_logprobs", sampling.top_logprobs, (0, MAX_TOP_LOGPROBS))
    yield (
        sampling.logprobs or not sampling.top_logprobs,
        "top_logprobs",
        "needs logprobs to be true",
    )
    yield _within("prompt_logprobs", sampling.prompt_logprobs or 0, (0, MAX_TOP_LOGPROBS))


def _of_tokens(sampling: SamplingParams, vocab: int) -> Iterable[_Rule]:
    """Lists of token ids. An id outside the vocabulary would index beyond the logits."""
    biases, stops = sampling.logit_bias, sampling.stop_token_ids
    yield len(biases) <= MAX_BIASES, "logit_bias", f"must have at most {MAX_BIASES} entries"
    yield _known("logit_bias", (token_id for token_id, _ in biases), vocab)
    low, high = _BIAS
    yield (
        all(low <= amount <= high for _, amount in biases),
        "logit_bias",
        f"must have values between {low:g} and {high:g}",
    )
    yield (
        len(stops) <= MAX_STOP_TOKENS,
        "stop_token_ids",
        f"must have at most {MAX_STOP_TOKENS} ids",
    )
    yield _known("stop_token_ids", stops, vocab)
    yield sampling.min_new_tokens >= 0, "min_tokens", "must be 0 (off) or more"


def _within(param: str, value: float, bounds: tuple[float, float]) -> _Rule:
    low, high = bounds
    return low <= value <= high, param, f"must be between {low:g} and {high:g}"


def _known(param: str, ids: Iterable[int], vocab: int) -> _Rule:
    return all(0 <= i < vocab for i in ids), param, f"must have token ids in [0, {vocab})"
