"""Fields of configuration: what one of them carries, and how its value is checked.

Knows nothing of what an option does, only how it may be spelled (lists of sizes, sizes in bytes). It must not import
torch or read the environment. Invariant: a refusal is a ConfigError with the field's name, its value and the remedy.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from dataclasses import Field, field, fields
from typing import Any

from ostinato.errors import ConfigError

_UNITS: Mapping[str, int] = {
    "": 1,
    "k": 1000,
    "m": 1000**2,
    "g": 1000**3,
    "ki": 1 << 10,
    "mi": 1 << 20,
    "gi": 1 << 30,
    "t": 1000**4,
    "ti": 1 << 40,
}

MOST_BYTES = 1 << 60
"""What a size stays below, so that no product of it leaves 64 bits."""


def option(
    default: Any,
    help: str,
    *,
    choices: tuple[str, ...] | None = None,
    minimum: int | None = None,
    maximum: int = 2**31 - 1,
    flag: bool | str = True,
) -> Any:
    """A field with what validation and the command line need: help, choices, least and greatest value, whether it is
    a flag, or its name as one.
    """
    facts = {"help": help, "choices": choices, "minimum": minimum, "maximum": maximum, "flag": flag}
    return field(default=default, metadata=facts)


def check_field(config: Any, spec: Field[Any]) -> None:
    """One field of a frozen dataclass alone; writes it back where it has a looser spelling."""
    value, choices, minimum = getattr(config, spec.name), spec.metadata["choices"], spec.metadata["minimum"]
    if (value is None and "None" in str(spec.type)) or spec.name == "max_body_bytes":
        return
    if spec.name.endswith("_buckets"):
        object.__setattr__(config, spec.name, _check_buckets(spec.name, value))
    elif spec.name == "kv_memory":
        parse_bytes(value, name=spec.name)
    elif spec.type == "tuple[str, ...]":
        if isinstance(value, str) or not all(isinstance(item, str) and item for item in value):
            got = "" if spec.name == "api_keys" else f", got {value!r}"  # keys belong into no log
            raise ConfigError(f"{spec.name} must be a list of non-empty strings{got}")
        object.__setattr__(config, spec.name, tuple(value))
    elif choices is not None:
        if value not in choices:
            hint = difflib.get_close_matches(str(value), choices, n=1)
            meant = f" (did you mean {hint[0]!r}?)" if hint else ""
            raise ConfigError(f"{spec.name} {value!r} is unknown{meant}; choose one of {', '.join(choices)}")
    elif minimum is not None:
        if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
            raise ConfigError(f"{spec.name} must be a whole number of at least {minimum}, got {value!r}")
        if value > spec.metadata["maximum"]:
            raise ConfigError(f"{spec.name} must be at most {spec.metadata['maximum']}, got {value}")
    elif spec.type == "float":
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
            raise ConfigError(f"{spec.name} must be a number from 0 to 1, got {value!r}")
    elif not isinstance(value, bool if spec.type == "bool" else str):
        kind = "True or False" if spec.type == "bool" else "a string"
        raise ConfigError(f"{spec.name} must be {kind}, got {value!r}")
    elif value == "":
        raise ConfigError(f"{spec.name} is empty; give a value or leave it out")


def refuse_unknown(cls: type, options: Mapping[str, Any]) -> None:
    """Raise ConfigError for a name that is no field of `cls`, with the closest one that is."""
    names = [spec.name for spec in fields(cls)]
    for name in options:
        if name not in names:
            close = difflib.get_close_matches(name, names, n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"the options are {', '.join(names)}"
            raise ConfigError(f"unknown option {name!r}; {hint}")


def parse_bytes(value: str | int, *, name: str = "size") -> int:
    """A size in bytes from a number or a string like "512MiB" or "2GB". Raises ConfigError naming `name`."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(?:([kKmMgGtT]i?)?[bB]?)\s*", str(value))
    size = (
        0.0
        if match is None or isinstance(value, bool)
        else float(match[1]) * _UNITS[(match[2] or "").lower()]
    )
    if not 1 <= size < MOST_BYTES:
        raise ConfigError(f"{name} {value!r} is no size; give bytes or a string like '512MiB' or '2GB'")
    return int(size)


def whole_number(text: str) -> int | None:
    """The number that the digits of `text` are, or None where it holds anything else."""
    found = re.fullmatch(r"\s*([0-9]{1,18})\s*", text)
    return None if found is None else int(found[1])


def _check_buckets(name: str, value: object) -> tuple[int, ...]:
    """Sizes as a tuple, from a list or a string like "1,2,4"."""
    if isinstance(value, str):
        parts = value.split(",")
        value = [part if (number := whole_number(part)) is None else number for part in parts]
    if not isinstance(value, Iterable):
        raise ConfigError(f"{name} must be a list of sizes, got {value!r}; for example [1, 2, 4, 8]")
    sizes = tuple(value)
    bad = [size for size in sizes if not isinstance(size, int) or isinstance(size, bool) or size < 1]
    if bad or not sizes:
        raise ConfigError(
            f"{name} must hold whole numbers of at least 1, got {bad or 'none'}; for example 1,2,4,8"
        )
    return sizes
