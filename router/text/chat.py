"""Chat messages -> prompt, through the model's own Jinja template, in a sandbox.

The environment offers what templates on the Hub expect of transformers: ``raise_exception``,
``strftime_now``, ``tojson`` without HTML escapes, loop controls and ``{% generation %}``.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from core.clock import Clock
from core.errors import ModelError, RequestError
from router.echo import clipped
from router.text.request import ChatPrompt
from router.text.tokenizer import read_tokenizer_config

ROLES = ("system", "developer", "user", "assistant", "tool")
_RESERVED = frozenset({"messages", "tools", "documents", "add_generation_prompt"})
_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token")
# What a template can raise on messages it was not written for.
_TEMPLATE_ERRORS = (
    jinja2.TemplateError, TypeError, ValueError, ArithmeticError, LookupError, AttributeError
)  # fmt: skip

Message = dict[str, Any]  # opaque: role, content and what else the template may know


class _GenerationBlock(Extension):
    """``{% generation %}`` marks assistant text for training; here it is its body."""

    tags = {"generation"}  # noqa: RUF012  the base class declares it like this

    def parse(self, parser: Parser) -> list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """A compiled template. ``render`` may be called from any thread."""

    def __init__(self, source: str, variables: dict[str, Any], clock: Clock, *, name: str) -> None:
        """``name`` is the file it came from, for messages; ``variables`` are set at each render."""
        self._variables = variables
        self._keeps_developer = "developer" in source
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda form: datetime.fromtimestamp(
            clock.epoch()
        ).strftime(form)
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise ModelError(f"{name}: the chat template does not compile: {error}") from error

    def render(self, prompt: ChatPrompt) -> str:
        """The prompt, ready for the assistant's turn; raises RequestError naming what is wrong."""
        if clash := sorted(_RESERVED & prompt.template_args.keys()):
            raise RequestError(
                f"chat_template_kwargs must not set {', '.join(clash)}",
                param="chat_template_kwargs",
            )
        messages = [self._message(m, i) for i, m in enumerate(_some(prompt.messages))]
        variables = {
            **self._variables,
            **prompt.template_args,
            "messages": messages,
            "tools": None,
            "documents": None,
            "add_generation_prompt": True,
        }
        try:
            return self._template.render(variables)
        except _TEMPLATE_ERRORS as error:
            raise RequestError(
                f"the model's chat template refuses these messages: {clipped(error, 300)}",
                param="messages",
            ) from error

    def _message(self, message: Message, position: int) -> Message:
        where = f"messages[{position}]"
        role = message.get("role")
        if role not in ROLES:
            raise RequestError(
                f"{where}.role is {clipped(repr(role))}: choose one of {', '.join(ROLES)}",
                param=f"{where}.role",
            )
        if message.get("tool_calls") or message.get("function_call"):
            raise RequestError(
                f"{where}.tool_calls is not supported yet: only text messages are",
                param=f"{where}.tool_calls",
            )
        if role == "developer" and not self._keeps_developer:
            role = "system"  # the older name of the same role
        extra = {k: v for k, v in message.items() if v is not None}
        return {**extra, "role": role, "content": _content(message, where)}


def open_template(folder: Path, clock: Clock) -> ChatTemplate | None:
    """The template of a model folder, or None; raises ModelError naming the file at fault.

    ``chat_template.jinja`` goes before ``tokenizer_config.json``, where the template is a string
    or a list of named ones, of which ``default`` is taken.
    """
    config = read_tokenizer_config(folder)
    variables = {
        name: text
        for name in _SPECIAL_TOKENS
        if (text := _token_text(config.get(name))) is not None
    }
    path = folder / "chat_template.jinja"
    if path.is_file():
        try:
            source = path.read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ModelError(f"cannot read {path}: {error}") from error
        return ChatTemplate(source, variables, clock, name=str(path))
    path = folder / "tokenizer_config.json"
    declared = config.get("chat_template")
    if declared is None:
        return None
    return ChatTemplate(_declared_source(declared, path), variables, clock, name=str(path))


def _declared_source(declared: Any, path: Path) -> str:  # opaque: JSON
    if isinstance(declared, str):
        return declared
    if isinstance(declared, list):
        named = {t.get("name"): t.get("template") for t in declared if isinstance(t, dict)}
        if isinstance(source := named.get("default"), str):
            return source
    raise ModelError(
        f'{path}: chat_template must be a string, or a list with a template named "default"'
    )


def _token_text(token: Any) -> str | None:  # opaque: a string, or {"content": string}
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) else None


def _some(messages: Sequence[Message]) -> Sequence[Message]:
    if not messages:
        raise RequestError("messages is empty: give at least one", param="messages")
    return messages


def _content(message: Message, where: str) -> str:
    """The text of a message; several text parts are put on lines of their own."""
    content = message.get("content")
    if isinstance(content, str):
        return content
    if content is None and message["role"] == "assistant":
        return ""
    if not isinstance(content, list):
        raise RequestError(
            f"{where}.content must be a string or a list of text parts", param=f"{where}.content"
        )
    return "\n".join(_text(part, f"{where}.content[{i}]") for i, part in enumerate(content))


def _text(part: Any, where: str) -> str:  # opaque: JSON
    """What a part of a message's content says."""
    kind = part.get("type") if isinstance(part, dict) else type(part).__name__
    if not isinstance(part, dict) or kind != "text":
        raise RequestError(
            f"{where} is of type {clipped(repr(kind))}: only text parts are supported", param=where
        )
    text = part.get("text")
    if not isinstance(text, str):
        raise RequestError(f"{where} is a text part: it needs `text`, a string", param=where)
    return text


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _tojson(
    value: Any,  # opaque: whatever the template has
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )
