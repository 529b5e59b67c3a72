"""antiphon.v1.Antiphon over a FrontDoor: one method for each call of the .proto."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import grpc
import msgspec

from core.errors import RequestError
from router.echo import quoted
from router.frontdoor import FrontDoor
from router.keys import Keys
from router.replicas import Member, Replica
from router.rpc import convert
from router.rpc.errors import ID_IN_USE, Context, answering
from router.rpc.gen import antiphon_pb2 as pb
from router.rpc.guard import authorization
from router.text.request import TextRequest
from router.text.tokenizer import decode

log = logging.getLogger(__name__)

Members = Callable[[], Sequence[tuple[Member, Replica | None]]]

MAX_ID_CHARS = 128
_INLINE_IDS = 16_384  # more are decoded in a thread: that takes more than about 5 ms


class AntiphonService:
    """Handlers of grpc.aio. They live on one event loop and share the door with HTTP."""

    def __init__(self, door: FrontDoor, members: Members, keys: Keys) -> None:
        self._door = door
        self._defaults = door.model.sampling
        self._members = members
        self._keys = keys
        # running: caller and their request id -> the front door's
        self._rids: dict[tuple[str, str], str] = {}

    # --- generation --------------------------------------------------------------------------

    async def Generate(self, request: pb.GenerateRequest, context: Context) -> None:
        async with answering(context):
            asked = convert.generate_request(request, context.time_remaining(), self._defaults)
            await self._stream(asked, request.options, context)

    async def Chat(self, request: pb.ChatRequest, context: Context) -> None:
        async with answering(context):
            asked = convert.chat_request(request, context.time_remaining(), self._defaults)
            await self._stream(asked, request.options, context)

    async def _stream(
        self, asked: TextRequest, options: pb.GenerationOptions, context: Context
    ) -> None:
        """Write what the request says as it says it; a cancelled write stops it, too."""
        self._check_model(options.model, "options.model")
        caller = self._caller(context)
        trace = _trace_of(context)
        client_id = options.request_id
        asked = msgspec.structs.replace(asked, caller=caller, trace=trace, client_id=client_id)
        with self._named(caller, options.request_id, asked.rid) as request_id:
            async with self._door.open(asked) as stream:
                async for events in stream:
                    for message in convert.responses(request_id, events, stream.usage):
                        await _write(context, message)
        if stream.timed_out:
            await context.abort(
                grpc.StatusCode.DEADLINE_EXCEEDED, "the deadline passed before the last token"
            )

    @contextmanager
    def _named(self, caller: str, request_id: str, rid: str) -> Iterator[str]:
        """Hold the id that the caller knows the request by while the body runs."""
        if len(request_id) > MAX_ID_CHARS:
            raise RequestError(
                f"request_id must have at most {MAX_ID_CHARS} characters", param="request_id"
            )
        known = request_id or rid
        if (caller, known) in self._rids:
            raise RequestError(
                f"a request with the id {quoted(known)} is running: choose another, or none",
                param="request_id",
                code=ID_IN_USE,
            )
        if request_id:
            log.info("its client calls it %s", quoted(request_id, MAX_ID_CHARS), extra={"rid": rid})
        self._rids[caller, known] = rid
        try:
            yield known
        finally:
            del self._rids[caller, known]

    async def Abort(self, request: pb.AbortRequest, context: Context) -> pb.AbortResponse:
        key = self._caller(context), request.request_id
        rid = self._rids.get(key, request.request_id)
        return pb.AbortResponse(found=self._door.abort(rid))

    def _caller(self, context: Context) -> str:
        """Who makes the call; that they may, the guard has seen."""
        return self._keys.holder(authorization(context.invocation_metadata()))

    # --- tokens ------------------------------------------------------------------------------

    async def Tokenize(self, request: pb.TokenizeRequest, context: Context) -> pb.TokenizeResponse:
        async with answering(context):
            self._check_model(request.model, "model")
            match request.WhichOneof("input"):
                case "text":
                    ids = await self._door.encode(request.text, add_special=not request.plain)
                case "conversation":
                    said = request.conversation
                    prompt = convert.chat_prompt(said.messages, said.chat_template_kwargs)
                    ids = await self._door.encode(prompt)
                case _:
                    raise RequestError("input is missing: set text or conversation", param="input")
        return pb.TokenizeResponse(token_ids=ids)

    async def Detokenize(
        self, request: pb.DetokenizeRequest, context: Context
    ) -> pb.DetokenizeResponse:
        async with answering(context):
            self._check_model(request.model, "model")
            ids, vocab = request.token_ids, self._door.model.vocab_size
            if ids and max(ids) >= vocab:
                raise RequestError(
                    f"token ids must be in [0, {vocab}): there is {max(ids)}", param="token_ids"
                )
            text = await self._text(tuple(ids), skip_special=not request.keep_special_tokens)
        return pb.DetokenizeResponse(text=text)

    async def _text(self, ids: tuple[int, ...], *, skip_special: bool) -> str:
        tokenizer = self._door.tokenizer
        if len(ids) <= _INLINE_IDS:
            return decode(tokenizer, ids, skip_special=skip_special)
        return await asyncio.to_thread(decode, tokenizer, ids, skip_special=skip_special)

    # --- operations --------------------------------------------------------------------------

    async def ListModels(
        self, request: pb.ListModelsRequest, context: Context
    ) -> pb.ListModelsResponse:
        model = self._door.model
        return pb.ListModelsResponse(
            models=[convert.model_card(model, name) for name in model.names]
        )

    async def GetLoad(self, request: pb.GetLoadRequest, context: Context) -> pb.GetLoadResponse:
        return pb.GetLoadResponse(
            running_requests=self._door.running,
            live_choices=self._door.admission.live,
            choice_limit=self._door.admission.limit,
            ranks=convert.rank_loads(self._members()),
        )

    def _check_model(self, name: str, field: str) -> None:
        if name:
            self._door.model.check_name(name, field)


def _trace_of(context: Context) -> str:
    """The traceparent that the caller sent, if any."""
    pairs = context.invocation_metadata() or ()
    return next((value for name, value in pairs if name == "traceparent"), "")


async def _write(context: Context, message: pb.GenerateResponse) -> None:
    """Write with the flow control of the transport: returns once there is room for more."""
    try:
        await context.write(message)
    except grpc.aio.InternalError as error:
        # the caller left while it was on its way; the cancellation of this task is, too
        raise asyncio.CancelledError from error
