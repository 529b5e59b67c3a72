"""OpenAI request bodies. Responses are plain dicts (convert.py): they are built for every token.

Fields that change the answer and are not served yet are refused by name; what clients send
without effect here (user, store, metadata, ...) is taken and ignored.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, cast

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    Strict,
    StrictBool,
    StrictInt,
    StrictStr,
)

from core.errors import RequestError
from router.echo import clipped
from router.text.request import MAX_CHOICES, MAX_STOP_TOKENS, MAX_STOPS, MAX_TOP_LOGPROBS

_INT64 = 1 << 63


def _as_whole(value: Any) -> Any:  # opaque: JSON
    """JSON has one kind of number, and some clients write 3 as 3.0."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _in_int64(value: int) -> int:
    if not -_INT64 <= value < _INT64:  # a range of pydantic's would be shown as rounded floats
        raise ValueError(f"must be between {-_INT64} and {_INT64 - 1}")
    return value


# Nothing is guessed: "3" is no number, true is not 1, and 1 is not true.
Whole = Annotated[int, BeforeValidator(_as_whole), Strict()]
Seed = Annotated[Whole, AfterValidator(_in_int64)]
Real = Annotated[float, Strict()]


def _as_stops(value: Any) -> Any:  # opaque: JSON
    if value is None:
        return []
    return [value] if isinstance(value, str) else value


StopList = Annotated[
    list[Annotated[StrictStr, Field(min_length=1)]],
    BeforeValidator(_as_stops),
    Field(max_length=MAX_STOPS),
]


Prompts = str | list[str] | list[int] | list[list[int]]


def _as_prompts(value: Any) -> Prompts:  # opaque: JSON
    """Checked by hand: a union would describe the same mistake four times, for every token."""
    if isinstance(value, str) or _all(value, str) or _all(value, int):
        return cast("Prompts", value)
    if _all(value, list) and all(_all(ids, int) for ids in value):
        return cast("Prompts", value)
    raise ValueError(
        "must be a string, a list of strings, a list of token ids or a list of such lists"
    )


def _all(value: Any, kind: type) -> bool:  # opaque: JSON
    return isinstance(value, list) and set(map(type, value)) <= {kind}


class StreamOptions(BaseModel):
    """What a stream tells besides text."""

    include_usage: StrictBool = False
    continuous_usage_stats: StrictBool = False


class GenerationBody(BaseModel):
    """What chat and plain completions share. Ranges without a check here are the front door's."""

    model_config = ConfigDict(extra="allow", allow_inf_nan=False)

    model: StrictStr | None = None  # null or empty: the model that is served
    max_tokens: Whole | None = None
    temperature: Real | None = None
    top_p: Real | None = None
    top_k: Annotated[Whole | None, Field(ge=-1)] = None  # -1 and 0 are off
    min_p: Real | None = None
    repetition_penalty: Real | None = None
    presence_penalty: Real | None = None
    frequency_penalty: Real | None = None
    logit_bias: dict[int, Real] | None = None  # keys are token ids, written as strings
    min_tokens: Whole | None = None
    prompt_logprobs: Whole | None = None
    stop: StopList = []
    stop_token_ids: Annotated[
        list[Annotated[StrictInt, Field(ge=0)]] | None, Field(max_length=MAX_STOP_TOKENS)
    ] = None
    ignore_eos: StrictBool = False
    seed: Seed | None = None
    n: Annotated[Whole | None, Field(ge=1, le=MAX_CHOICES)] = None
    stream: StrictBool | None = False
    stream_options: StreamOptions | None = None
    skip_special_tokens: StrictBool = True
    include_stop_str_in_output: StrictBool = False
    no_stop_trim: StrictBool = False  # the same, under another name
    cache_salt: StrictStr | None = None
    priority: Whole | None = None


class ChatBody(GenerationBody):
    """POST /v1/chat/completions."""

    messages: list[dict[str, Any]]  # opaque: ChatTemplate.render checks them
    max_tokens: Annotated[Whole | None, Field(ge=1)] = None
    max_completion_tokens: Annotated[Whole | None, Field(ge=1)] = None
    logprobs: StrictBool | None = False
    top_logprobs: Annotated[Whole | None, Field(ge=0, le=MAX_TOP_LOGPROBS)] = None
    chat_template_kwargs: dict[str, Any] | None = None  # opaque: for the template


class CompletionBody(GenerationBody):
    """POST /v1/completions."""

    prompt: Annotated[Prompts, PlainValidator(_as_prompts, json_schema_input_type=Prompts)]
    logprobs: Annotated[Whole | None, Field(ge=0, le=MAX_TOP_LOGPROBS)] = None
    echo: StrictBool | None = False
    best_of: Annotated[Whole | None, Field(ge=1, le=MAX_CHOICES)] = None


def _is_text_format(value: Any) -> bool:  # opaque: JSON
    return isinstance(value, dict) and value.get("type") == "text"


def _is_text_only(value: Any) -> bool:  # opaque: JSON
    return bool(value == ["text"])


def _one_of(*values: Any) -> Callable[[Any], bool]:  # opaque: JSON
    return lambda value: value in values


_OFF = _one_of(0, False, "", [], {})

# Fields that change the answer and are not served yet: which values leave it as it is, in words.
# null always does.
_UNSUPPORTED: dict[str, tuple[Callable[[Any], bool], str]] = {
    "tools": (_OFF, "an empty list"),
    "tool_choice": (_one_of("none", "auto"), '"none" or "auto"'),
    "functions": (_OFF, "an empty list"),
    "function_call": (_one_of("none", "auto"), '"none" or "auto"'),
    "response_format": (_is_text_format, '{"type": "text"}'),
    "modalities": (_is_text_only, '["text"]'),
    "audio": (_OFF, "null"),
    "web_search_options": (_OFF, "null"),
    "echo": (_OFF, "false"),
    "suffix": (_OFF, "null"),
    "regex": (_OFF, "null"),
    "ebnf": (_OFF, "null"),
    "structured_outputs": (_OFF, "null"),
    "stop_regex": (_OFF, "null"),
    "use_beam_search": (_OFF, "false"),
    "lora_path": (_OFF, "null"),
    "custom_logit_processor": (_OFF, "null"),
    "continue_final_message": (_OFF, "false"),
    "add_generation_prompt": (_one_of(True), "true"),
    "return_hidden_states": (_OFF, "false"),
}


def refuse_unsupported(body: GenerationBody) -> None:
    """Raise RequestError for a field whose effect the caller would miss."""
    extra = body.model_extra or {}
    for name, value in extra.items():
        rule = _UNSUPPORTED.get(name)
        if rule is not None and value is not None and not rule[0](value):
            raise RequestError(
                f"{name} is not supported yet: leave it out or send {rule[1]}",
                param=name,
                code="unsupported_parameter",
            )
    best_of = extra.get("best_of")
    if best_of is not None and best_of != (body.n or 1):
        raise RequestError(
            f"best_of={clipped(best_of)} is not supported yet: leave it out or send the value of n",
            param="best_of",
            code="unsupported_parameter",
        )
