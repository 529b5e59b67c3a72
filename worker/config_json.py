"""ConfigJson: a config.json whose every complaint names the file, the key and what is supported."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

import msgspec

from core.errors import ModelError

T = TypeVar("T")


class ConfigJson:
    """A JSON object, or a section of one. null counts as absent."""

    def __init__(self, path: Path, values: dict[str, Any], prefix: str = "") -> None:
        self.path = path
        self._values = {key: value for key, value in values.items() if value is not None}
        self._prefix = prefix

    @classmethod
    def read(cls, path: Path) -> ConfigJson:
        """Raises ModelError where the file is missing or not a JSON object."""
        try:
            values = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
        except OSError as error:
            raise ModelError(
                f"{path} cannot be read ({error.strerror}): a model folder needs config.json, "
                "*.safetensors and tokenizer.json"
            ) from error
        except msgspec.DecodeError as error:
            raise ModelError(f"{path} is not a JSON object: {error}") from error
        return cls(path, values)

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def get(self, key: str, kind: Any, default: T | None = None) -> Any:  # opaque: kind's type
        """The value as ``kind`` (a type msgspec understands); ModelError where it is not."""
        if key not in self._values:
            if default is not None:
                return default
            raise ModelError(f"{self.path}: key {self._prefix}{key} is missing")
        try:
            return msgspec.convert(self._values[key], kind)
        except msgspec.ValidationError as error:
            raise ModelError(f"{self.path}: key {self._prefix}{key}: {error}") from error

    def count(self, key: str, default: int | None = None) -> int:
        """An integer of at least 1."""
        value: int = self.get(key, int, default)
        self.require(value >= 1, key, "at least 1")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value: float = self.get(key, float, default)
        return float(value)

    def flag(self, key: str, *, default: bool) -> bool:
        value: bool = self.get(key, bool, default)
        return value

    def word(self, key: str, default: str, known: tuple[str, ...]) -> str:
        """One of the ``known`` words."""
        value: str = self.get(key, str, default)
        self.require(value in known, key, f"one of {', '.join(known)}")
        return value

    def section(self, key: str) -> ConfigJson:
        """The object under ``key``; empty where it is absent."""
        values: dict[str, Any] = self.get(key, dict[str, Any], {})
        return ConfigJson(self.path, values, prefix=f"{self._prefix}{key}.")

    def require(self, ok: bool, key: str, supported: str) -> None:
        """Raise ModelError with the value of ``key`` and what is supported, unless ``ok``."""
        if not ok:
            value = self._values.get(key)
            raise ModelError(
                f"{self.path}: key {self._prefix}{key} is {value!r}; supported: {supported}"
            )
