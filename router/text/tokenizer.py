"""Tokenizers: text to token ids, and token ids to the bytes each of them stands for.

Decoding is defined by bytes per token: the text of some tokens is their bytes, joined and read as
UTF-8. That makes incremental decoding O(1) a token and exact (router/text/detokenizer.py).
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

import tokenizers

from core.errors import ModelError
from core.registry import Entry, Registry
from router.text.least import LeastTokens, read_least
from router.text.token_bytes import TokenBytes, read_decoder


class Tokenizer(Protocol):
    """What the front door needs of a tokenizer. Thread-safe: long texts are encoded in a thread."""

    @property
    def vocab_size(self) -> int:
        """Ids are in [0, vocab_size)."""
        ...

    @property
    def bos_id(self) -> int | None: ...

    @property
    def eos_id(self) -> int | None: ...

    @property
    def strips_first_space(self) -> bool:
        """Whether a text's first space belongs to the encoding, not to the text."""
        ...

    def least_tokens(self, text: str) -> int:
        """No more than the tokens of ``text``, found by its length alone; may be 0."""
        ...

    def encode(self, text: str, *, add_special: bool) -> list[int]:
        """Token ids of ``text``; special tokens written out in it are recognised.

        ``add_special`` adds what the model's post-processor puts around a text, if anything.
        """
        ...

    def token_bytes(self, token_id: int) -> bytes:
        """What the token stands for, special tokens too; empty for an id nobody defined."""
        ...

    def is_special(self, token_id: int) -> bool: ...


def decode(tokenizer: Tokenizer, token_ids: Iterable[int], *, skip_special: bool = True) -> str:
    """The text of a whole sequence; bytes which are no character become U+FFFD."""
    kept = (t for t in token_ids if not (skip_special and tokenizer.is_special(t)))
    text = b"".join(map(tokenizer.token_bytes, kept)).decode("utf-8", errors="replace")
    return text.removeprefix(" ") if tokenizer.strips_first_space else text


class HfTokenizer:
    """The ``tokenizer.json`` of a model folder, through the ``tokenizers`` library."""

    def __init__(
        self,
        inner: tokenizers.Tokenizer,
        table: TokenBytes,
        config: dict[str, Any],
        least: LeastTokens,
    ) -> None:
        inner.no_truncation()  # a prompt is refused or served whole
        inner.no_padding()
        self._inner = inner
        self._table = table
        self._special = frozenset(
            i for i, token in inner.get_added_tokens_decoder().items() if token.special
        )
        self._bytes: dict[int, bytes] = {}  # filled as tokens are met
        self.vocab_size = inner.get_vocab_size(with_added_tokens=True)
        self.bos_id = self._id_of(config.get("bos_token"))
        self.eos_id = self._id_of(config.get("eos_token"))
        self.strips_first_space = table.strips_first_space
        self.least_tokens = least.of

    def _id_of(self, token: Any) -> int | None:  # opaque: a string, or {"content": string}
        content = token.get("content") if isinstance(token, dict) else token
        return self._inner.token_to_id(content) if isinstance(content, str) else None

    def encode(self, text: str, *, add_special: bool) -> list[int]:
        return self._inner.encode(text, add_special_tokens=add_special).ids

    def token_bytes(self, token_id: int) -> bytes:
        known = self._bytes.get(token_id)
        if known is None:
            token = self._inner.id_to_token(token_id) if 0 <= token_id < 1 << 32 else None
            known = self._table.of(token) if token is not None else b""
            self._bytes[token_id] = known
        return known

    def is_special(self, token_id: int) -> bool:
        return token_id in self._special


class BytesTokenizer:
    """Ids 0 to 255 are the bytes of the UTF-8 text; 256 begins a text and 257 ends it."""

    vocab_size = 258
    bos_id = 256
    eos_id = 257
    strips_first_space = False

    def least_tokens(self, text: str) -> int:
        return len(text)

    def encode(self, text: str, *, add_special: bool) -> list[int]:
        return list(text.encode("utf-8"))

    def token_bytes(self, token_id: int) -> bytes:
        return bytes((token_id,)) if 0 <= token_id < 256 else b""

    def is_special(self, token_id: int) -> bool:
        return token_id in (self.bos_id, self.eos_id)


def open_hf(folder: Path) -> HfTokenizer:
    """Read a model folder; raises ModelError naming the file that is missing or broken."""
    path = folder / "tokenizer.json"
    raw = _read(path)
    table = read_decoder(raw, path)
    try:
        inner = tokenizers.Tokenizer.from_str(raw)
    except Exception as error:  # the library raises no narrower one
        raise ModelError(f"{path} is not a tokenizer this library can read: {error}") from error
    least = read_least(json.loads(raw), table, inner.get_vocab(with_added_tokens=True))
    return HfTokenizer(inner, table, read_tokenizer_config(folder), least)


def open_bytes(folder: Path) -> BytesTokenizer:
    """The byte tokenizer needs nothing from the model folder."""
    return BytesTokenizer()


def read_tokenizer_config(folder: Path) -> dict[str, Any]:
    """``tokenizer_config.json`` as a dict, empty when there is none."""
    path = folder / "tokenizer_config.json"
    if not path.is_file():
        return {}
    try:
        config = json.loads(_read(path))
    except ValueError as error:
        raise ModelError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(config, dict):
        raise ModelError(f"{path} must hold a JSON object")
    return config


def _read(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ModelError(f"{path} is not UTF-8 text") from error


TOKENIZERS: Registry[Tokenizer] = Registry(
    "tokenizer",
    {
        "hf": Entry("router.text.tokenizer:open_hf", needs=("tokenizers",)),
        "bytes": Entry("router.text.tokenizer:open_bytes"),
    },
)
