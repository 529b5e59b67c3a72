"""Protobuf <-> the front door's types. Pure functions."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from google.protobuf.struct_pb2 import Struct, Value

from core.errors import RequestError
from core.wire import FinishReason
from router.replicas import Member, Replica
from router.rpc.gen import antiphon_pb2 as pb
from router.text.request import (
    NEUTRAL,
    ChatPrompt,
    ChosenToken,
    Prompt,
    PromptText,
    SamplingDefaults,
    ServedModel,
    TextEvent,
    TextRequest,
    TextUsage,
    TokenText,
)

# Clients take at most 4 MiB a message, and a token with 20 alternatives is about 0.6 KiB.
MESSAGE_TOKENS = 1024

_FINISH = {
    None: pb.FINISH_REASON_UNSPECIFIED,
    FinishReason.STOP: pb.FINISH_REASON_STOP,
    FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
    FinishReason.ABORT: pb.FINISH_REASON_ABORT,
}
_LOAD_FIELDS = (
    "waiting_requests", "waiting_tokens", "running_requests", "handoff_requests", "free_pages",
    "cached_pages", "total_pages",
)  # fmt: skip

# --- requests ------------------------------------------------------------------------------------


def generate_request(
    request: pb.GenerateRequest, timeout_s: float | None, defaults: SamplingDefaults = NEUTRAL
) -> TextRequest:
    """A Generate call as the front door takes it; raises RequestError."""
    match request.WhichOneof("prompt"):
        case "text":
            prompt: Prompt = request.text
        case "token_ids":
            prompt = tuple(request.token_ids.ids)
        case _:
            raise RequestError("prompt is missing: set text or token_ids", param="prompt")
    return _request(prompt, request.options, timeout_s, defaults)


def chat_request(
    request: pb.ChatRequest, timeout_s: float | None, defaults: SamplingDefaults = NEUTRAL
) -> TextRequest:
    """A Chat call as the front door takes it."""
    prompt = chat_prompt(request.messages, request.chat_template_kwargs)
    return _request(prompt, request.options, timeout_s, defaults)


def chat_prompt(messages: Iterable[pb.ChatMessage], template_args: Struct) -> ChatPrompt:
    """A conversation as the chat template takes it."""
    return ChatPrompt(
        messages=tuple(map(_message, messages)),
        template_args={name: _plain(value) for name, value in template_args.fields.items()},
    )


def _message(message: pb.ChatMessage) -> dict[str, Any]:  # opaque: for the template
    named = {"name": message.name} if message.HasField("name") else {}
    return {"role": message.role, "content": message.content, **named}


def _plain(value: Value) -> Any:  # opaque: JSON
    """A JSON value. Whole numbers become int: a template would show 5 as 5.0."""
    match value.WhichOneof("kind"):
        case "struct_value":
            return {name: _plain(inner) for name, inner in value.struct_value.fields.items()}
        case "list_value":
            return [_plain(inner) for inner in value.list_value.values]
        case "number_value":
            number = value.number_value
            return int(number) if number.is_integer() else number
        case "string_value":
            return value.string_value
        case "bool_value":
            return value.bool_value
        case _:
            return None


def _request(
    prompt: Prompt,
    options: pb.GenerationOptions,
    timeout_s: float | None,
    defaults: SamplingDefaults,
) -> TextRequest:
    return TextRequest(
        # not the caller's: behind this router, ids of all its fronts must differ
        rid=f"grpc-{uuid.uuid4().hex}",
        prompts=(prompt,),
        n=_set(options, "n", 1),
        max_new_tokens=_set(options, "max_tokens", None),
        sampling=defaults.params(
            temperature=_set(options, "temperature", None),
            top_p=_set(options, "top_p", None),
            top_k=_set(options, "top_k", None),
            min_p=_set(options, "min_p", None),
            repetition_penalty=_set(options, "repetition_penalty", None),
            presence_penalty=options.presence_penalty,
            frequency_penalty=options.frequency_penalty,
            logit_bias=tuple(sorted(options.logit_bias.items())),
            min_new_tokens=options.min_tokens,
            stop_token_ids=tuple(options.stop_token_ids),
            ignore_eos=options.ignore_eos,
            logprobs=options.logprobs,
            top_logprobs=options.top_logprobs,
            prompt_logprobs=_set(options, "prompt_logprobs", None),
        ),
        seed=_set(options, "seed", None),
        stops=tuple(options.stop),
        include_stop=options.include_stop,
        skip_special=not options.keep_special_tokens,
        echo=options.echo,
        timeout_s=timeout_s,
        cache_salt=options.cache_salt,
        priority=options.priority,
    )


def _set(options: pb.GenerationOptions, name: str, default: Any) -> Any:  # opaque: by field
    return getattr(options, name) if options.HasField(name) else default


# --- answers -------------------------------------------------------------------------------------


def responses(
    request_id: str, events: Iterable[TextEvent], usage: TextUsage
) -> Iterator[pb.GenerateResponse]:
    """What became known together, in messages that a client's limit lets pass."""
    total = pb.Usage(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        cached_tokens=usage.cached_tokens,
    )
    for choices in _cut(events):
        yield pb.GenerateResponse(request_id=request_id, choices=choices, usage=total)


def _cut(events: Iterable[TextEvent]) -> Iterator[list[pb.ChoiceDelta]]:
    """The deltas, ``MESSAGE_TOKENS`` at a time."""
    batch: list[pb.ChoiceDelta] = []
    tokens = 0
    for event in events:
        size = len(event.token_ids) + (len(event.prompt.rest) if event.prompt else 0)
        if batch and tokens + size > MESSAGE_TOKENS:
            yield batch
            batch, tokens = [], 0
        batch.append(_delta(event))
        tokens += size
    if batch:
        yield batch


def _delta(event: TextEvent) -> pb.ChoiceDelta:
    delta = pb.ChoiceDelta(
        index=event.index,
        text=event.text,
        token_ids=event.token_ids,
        logprobs=map(_logprob, event.logprobs),
        finish_reason=_FINISH[event.finish],
    )
    match event.matched_stop:
        case str() as stop:
            delta.matched_stop = stop
        case int() as token_id:
            delta.matched_token_id = token_id
    if event.prompt is not None:
        delta.prompt.CopyFrom(_prompt(event.prompt))
    return delta


def _prompt(prompt: PromptText) -> pb.PromptText:
    return pb.PromptText(
        text=prompt.text,
        first_token_id=prompt.first.token_id,
        first_data=prompt.first.data,
        rest=map(_logprob, prompt.rest),
    )


def _logprob(chosen: ChosenToken) -> pb.TokenLogprob:
    return pb.TokenLogprob(token=_token(chosen), top=map(_token, chosen.top))


def _token(token: TokenText) -> pb.TokenText:
    return pb.TokenText(token_id=token.token_id, data=token.data, logprob=token.logprob)


def model_card(model: ServedModel, name: str) -> pb.Model:
    """What clients may know of the model, under one of its names."""
    return pb.Model(
        name=name,
        context_len=model.context_len,
        vocab_size=model.vocab_size,
        eos_token_ids=sorted(model.eos_token_ids),
        created=model.created,
    )


def rank_loads(members: Sequence[tuple[Member, Replica | None]]) -> list[pb.RankLoad]:
    """One entry for each announced rank, in the order of their names."""
    loads = [_rank_load(member, replica) for member, replica in members]
    return sorted(loads, key=lambda load: load.rank)


def _rank_load(member: Member, replica: Replica | None) -> pb.RankLoad:
    known = pb.RankLoad(rank=str(member.incarnation.rank), role=member.role.value)
    if replica is not None:
        known.up = True
        known.outstanding_requests = replica.outstanding_requests
        known.outstanding_tokens = replica.outstanding_tokens
        for name in _LOAD_FIELDS:
            setattr(known, name, getattr(replica.load, name))
    return known
