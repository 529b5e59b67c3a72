"""Incremental detokenizer: token ids in, whole characters out.

A character that several tokens share is held back until its last byte is there. Bytes which can
no longer become a character turn into U+FFFD at once, so broken output never stalls a stream.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable

from router.text.tokenizer import Tokenizer

_Utf8 = codecs.getincrementaldecoder("utf-8")


class Detokenizer:
    """The text of one choice, as it grows. O(new tokens) a call.

    What ``push`` and the final ``flush`` returned, joined, is ``tokenizer.decode`` of all tokens.
    """

    def __init__(
        self, tokenizer: Tokenizer, *, skip_special: bool = True, continues: bool = False
    ) -> None:
        """``continues``: there is text before the first token, so its space belongs to the text."""
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._utf8 = _Utf8(errors="replace")
        self._strip = tokenizer.strips_first_space and not continues

    def push(self, token_ids: Iterable[int]) -> str:
        """The characters that these tokens complete."""
        tokenizer, skip = self._tokenizer, self._skip_special
        data = b"".join(
            [tokenizer.token_bytes(t) for t in token_ids if not (skip and tokenizer.is_special(t))]
        )
        return self._text(self._utf8.decode(data))

    def flush(self) -> str:
        """What is left at the end: U+FFFD for a character that was cut off, else nothing."""
        return self._text(self._utf8.decode(b"", final=True))

    def _text(self, text: str) -> str:
        if self._strip and text:
            self._strip = False
            return text.removeprefix(" ")
        return text
