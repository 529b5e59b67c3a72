"""Stop strings across chunk boundaries.

The result does not depend on how the text is cut into chunks: the stop string that is complete
first ends the text; of several that end at the same character, the longest does.
"""

from __future__ import annotations

from collections.abc import Sequence


class _Pattern:
    """One stop string and how much of it the text so far ends with (Knuth-Morris-Pratt)."""

    __slots__ = ("_fall_back", "matched", "text")

    def __init__(self, text: str) -> None:
        self.text = text
        self.matched = 0  # characters
        self._fall_back = _borders(text)

    def step(self, char: str) -> bool:
        """Take one character of the text; whether the stop string is complete now."""
        matched = self.matched
        while matched and self.text[matched] != char:
            matched = self._fall_back[matched - 1]
        if self.text[matched] == char:
            matched += 1
        complete = matched == len(self.text)
        # After a whole stop string that did not end the text, the search goes on.
        self.matched = self._fall_back[-1] if complete else matched
        return complete


def _borders(text: str) -> list[int]:
    """For each prefix: the length of its longest proper prefix that is also its suffix."""
    borders = [0] * len(text)
    length = 0
    for i in range(1, len(text)):
        while length and text[i] != text[length]:
            length = borders[length - 1]
        if text[i] == text[length]:
            length += 1
        borders[i] = length
    return borders


class StopMatcher:
    """Watches one choice's text for its stop strings; give it nothing after ``matched`` is set."""

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        """``include``: the stop string itself is part of the output."""
        assert all(stops), "an empty stop string would end every text"
        self._patterns = [_Pattern(stop) for stop in stops]
        self._include = include
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str, *, armed: bool = True) -> str:
        """The text that can be shown now; what may still become a stop string is held back.

        ``armed=False``: a stop string that ends in this text does not count.
        """
        if not self._patterns:
            return text
        for position, char in enumerate(text, start=len(self._held) + 1):
            complete = [p.text for p in self._patterns if p.step(char)]
            if complete and armed:
                self.matched = max(complete, key=len)
                end = position if self._include else position - len(self.matched)
                shown, self._held = (self._held + text)[:end], ""
                return shown
        whole = self._held + text
        keep = max(p.matched for p in self._patterns)
        shown, self._held = whole[: len(whole) - keep], whole[len(whole) - keep :]
        return shown

    def flush(self) -> str:
        """What was held back, at the end of a text that was not stopped."""
        held, self._held = self._held, ""
        return held
