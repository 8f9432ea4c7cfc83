"""Typed reading of a raw `config.json`: one place for defaults, spellings and errors about values.

A key that is present counts, also when it is null; one that is absent has the family's default. Knows nothing
of what the values mean. Invariant: every failure is a ModelError that names the file, the key and the value.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ostinato.errors import ModelError

_LARGEST = sys.float_info.max
_MOST = 2**31 - 1  # of any size: no model comes near it, and the product of two fits 64 bits


@dataclass(frozen=True, slots=True)
class RawConfig:
    """`values` of a config.json (or of the language model inside it) over a family's `defaults`."""

    values: Mapping[str, Any]
    defaults: Mapping[str, Any]
    origin: str

    def error(self, message: str) -> ModelError:
        """The error to raise, with the file in front."""
        return ModelError(f"{self.origin}: {message}")

    def get(self, key: str, default: Any = None) -> Any:
        """The value as it stands, else the family's default, else `default`."""
        if key in self.values:
            return self.values[key]
        return self.defaults.get(key, default)

    def size(self, *keys: str, most: int = _MOST) -> int:
        """A positive integer under the first of `keys` that is there; `most` is the largest that can be meant."""
        for key in keys:
            value = self.get(key)
            if value is not None:
                return self._positive(key, value, most)
        raise self.error(f"{' or '.join(keys)} is missing; take the config.json that belongs to the weights")

    def optional_size(self, key: str) -> int | None:
        """A positive integer, or None where the key is null or absent."""
        value = self.get(key)
        return None if value is None else self._positive(key, value)

    def optional_int(self, key: str) -> int | None:
        """An integer, or None for null, absent, or anything else."""
        value = self.get(key)
        return value if isinstance(value, int) and not isinstance(value, bool) else None

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number; `default` where the key is null or absent."""
        value = self.get(key)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) <= _LARGEST:
            raise self.error(f"{key} must be a number, got {value!r}; correct it")
        return float(value)

    def positive(self, key: str) -> float:
        """A number above 0."""
        value = self.number(key)
        if value <= 0:
            raise self.error(f"{key} must be above 0, got {value:g}; correct it")
        return value

    def flag(self, key: bool | str, *, default: bool = False, or_count: bool = False) -> bool:
        """A boolean; a constant instead of a key stands for itself. `or_count`: an integer stands for whether it is
        not zero.
        """
        if isinstance(key, bool):
            return key
        value = self.get(key, default)
        value = default if value is None else value
        if or_count and isinstance(value, int):
            value = value != 0
        if not isinstance(value, bool):
            raise self.error(f"{key} must be true or false, got {value!r}; correct it")
        return value

    def int_list(self, key: str) -> list[int] | None:
        """A list of integers (booleans count as 0 and 1), or None."""
        value = self.get(key)
        if value is None:
            return None
        if not isinstance(value, list) or not all(isinstance(item, int) for item in value):
            raise self.error(f"{key} must be a list of integers, got {value!r}; correct it")
        return [int(item) for item in value]

    def head_dim(self) -> int:
        """`head_dim`, or hidden size over heads where it is null or absent."""
        explicit = self.optional_size("head_dim")
        if explicit is not None:
            return explicit
        hidden, heads = self.size("hidden_size"), self.size("num_attention_heads")
        if hidden % heads:
            raise self.error(f"hidden_size {hidden} is no multiple of {heads} heads; give head_dim")
        return hidden // heads

    def _positive(self, key: str, value: Any, most: int = _MOST) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.error(f"{key} must be a positive integer, got {value!r}; correct it")
        if value > most:
            raise self.error(
                f"{key} must be at most {most}, got {value}; take the config.json that belongs to the weights"
            )
        return value
