"""What has been said in a session, in the form the endpoint takes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from bench.config import BenchConfig
from bench.words import IdVocabulary, Prompt, Span, Vocabulary, WordVocabulary

Messages = list[dict[str, str]]


class Conversation(Protocol):
    """Turns of questions and answers."""

    def ask(self, spans: Sequence[Span]) -> Prompt | Messages:
        """The whole prompt, with this question at its end."""
        ...

    def heard(self, answer: str) -> None:
        """The answer to the last question."""
        ...


class Chat:
    """Messages of a chat."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._messages: Messages = []

    def ask(self, spans: Sequence[Span]) -> Messages:
        self._add("user", str(self._vocabulary.render(spans)).lstrip())
        return list(self._messages)

    def heard(self, answer: str) -> None:
        self._add("assistant", answer)

    def _add(self, role: str, content: str) -> None:
        self._messages.append({"role": role, "content": content})


class Text:
    """One text that grows: questions and answers follow each other."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._said = ""

    def ask(self, spans: Sequence[Span]) -> str:
        self._said += str(self._vocabulary.render(spans))
        return self._said

    def heard(self, answer: str) -> None:
        self._said += answer


class Ids:
    """Token ids of one question; answers come as text, so there is no second one."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary

    def ask(self, spans: Sequence[Span]) -> Prompt:
        return self._vocabulary.render(spans)

    def heard(self, answer: str) -> None:
        """Nothing follows."""


class Talk:
    """Starts conversations as the configuration wants them."""

    def __init__(self, config: BenchConfig) -> None:
        ids = config.prompt_format == "ids"
        self._vocabulary: Vocabulary = IdVocabulary(*config.id_range) if ids else WordVocabulary()
        text = Chat if config.endpoint == "chat" else Text
        self._kind: type[Chat] | type[Text] | type[Ids] = Ids if ids else text

    def start(self) -> Conversation:
        return self._kind(self._vocabulary)
