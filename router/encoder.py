"""Encoder: prompts in text or messages -> token ids, checked against the model's limits."""

from __future__ import annotations

import asyncio

from core.errors import RequestError
from router.echo import clipped
from router.text.chat import ChatTemplate
from router.text.request import ChatPrompt, Prompt, ServedModel
from router.text.tokenizer import Tokenizer

_INLINE_CHARS = 16_384  # longer texts are encoded in a thread: they take more than about 5 ms


class Encoder:
    """Tokenizer and chat template of one model."""

    def __init__(
        self, tokenizer: Tokenizer, template: ChatTemplate | None, model: ServedModel
    ) -> None:
        self.tokenizer = tokenizer
        self._template = template
        self.model = model

    async def encode(
        self, prompt: str | ChatPrompt, *, add_special: bool = True, bounded: bool = False
    ) -> list[int]:
        """Token ids of a text or of a rendered conversation; raises RequestError.

        ``add_special`` is for texts: a chat template writes the special tokens itself.
        ``bounded``: refuse what cannot fit the context before the tokenizer reads it.
        """
        if _length(prompt) > _INLINE_CHARS:
            return await asyncio.to_thread(self._encode, prompt, add_special, bounded)
        return self._encode(prompt, add_special, bounded)

    async def prompt_ids(self, prompt: Prompt) -> list[int]:
        """The tokens of the prompt of a request; raises RequestError."""
        param = "messages" if isinstance(prompt, ChatPrompt) else "prompt"
        if isinstance(prompt, tuple):
            ids = list(prompt)
        else:
            ids = await self.encode(prompt, bounded=True)
        if not ids:
            raise RequestError("the prompt is empty: give at least one token", param=param)
        if min(ids) < 0 or max(ids) >= self.model.vocab_size:
            raise RequestError(
                f"token ids must be in [0, {self.model.vocab_size}); the prompt has "
                f"{clipped(min(ids))} to {clipped(max(ids))}",
                param=param,
            )
        return ids

    def _encode(self, prompt: str | ChatPrompt, add_special: bool, bounded: bool) -> list[int]:
        if isinstance(prompt, str):
            text, param = prompt, "prompt"
        else:
            text, param, add_special = self._render(prompt), "messages", False
        _check_unicode(text, param)
        if bounded:
            self._check_length(text, param)
        return self.tokenizer.encode(text, add_special=add_special)

    def _render(self, prompt: ChatPrompt) -> str:
        if self._template is None:
            raise RequestError(
                f"the model {self.model.name!r} has no chat template: "
                "send a prompt (/v1/completions, Generate)",
                param="messages",
            )
        return self._template.render(prompt)

    def _check_length(self, text: str, param: str) -> None:
        """Raise RequestError where the text cannot fit, however it is cut into tokens."""
        least, context = self.tokenizer.least_tokens(text), self.model.context_len
        if least > context:
            raise RequestError(
                f"This model's maximum context length is {context} tokens. However, your prompt "
                f"has {len(text)} characters, which are at least {least} tokens. "
                "Shorten the prompt.",
                param=param,
                code="context_length_exceeded",
            )


def _check_unicode(text: str, param: str) -> None:
    """Refuse half of a surrogate pair, which JSON can write and UTF-8 cannot."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise RequestError(
            f"{param} has half of a surrogate pair (U+{ord(text[error.start]):04X}), "
            "which is no character: send whole ones",
            param=param,
        ) from error


def _length(prompt: str | ChatPrompt) -> int:
    """About how many characters the prompt has."""
    if isinstance(prompt, str):
        return len(prompt)
    return sum(len(str(message.get("content"))) for message in prompt.messages)
