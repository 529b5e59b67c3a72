"""Registry[T]: a name from the configuration -> the implementation, imported only when chosen."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Generic, TypeVar, cast

from core.errors import BackendUnavailable, UnknownBackend

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Entry:
    """Where an implementation lives, and what it needs."""

    target: str  # "package.module:attribute"
    needs: tuple[str, ...] = ()  # third-party modules
    check: str = ""  # "package.module:function" that says what else is missing here

    def missing(self) -> tuple[str, ...]:
        modules = tuple(m for m in self.needs if find_spec(m) is None)
        if modules or not self.check:
            return modules
        ask = cast("Callable[[], tuple[str, ...]]", _attribute(self.check))
        return ask()


class Registry(Generic[T]):
    """Maps a name from the configuration to the class that implements ``T``."""

    def __init__(
        self, kind: str, entries: dict[str, Entry], *, order: tuple[str, ...] = ()
    ) -> None:
        self.kind = kind
        self._entries = entries
        self._order = order  # preference of "auto", best first

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    @property
    def words(self) -> tuple[str, ...]:
        """What a configuration may say: the names, and "auto" where there is an order."""
        return (*(("auto",) if self._order else ()), *self._entries)

    def usable(self) -> tuple[str, ...]:
        """Names of what can be used here."""
        return tuple(n for n, e in self._entries.items() if not e.missing())

    def resolve(self, name: str) -> str:
        """A known name; "auto" is the first of the order that can be used here.

        Raises UnknownBackend.
        """
        if name == "auto" and self._order:
            name = next((n for n in self._order if not self._entries[n].missing()), self._order[-1])
        if name not in self._entries:
            raise UnknownBackend(self.kind, name, known=tuple(self._entries))
        return name

    def load(self, name: str) -> Callable[..., T]:
        """Import and return the factory of ``resolve(name)``.

        Raises UnknownBackend or BackendUnavailable, both with the fix.
        """
        name = self.resolve(name)
        entry = self._entries[name]
        if missing := entry.missing():
            raise BackendUnavailable(self.kind, name, missing)
        return cast("Callable[..., T]", _attribute(entry.target))


def _attribute(target: str) -> object:
    module, _, name = target.partition(":")
    return getattr(import_module(module), name)
