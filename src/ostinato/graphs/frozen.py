"""What a captured graph took for granted, noticed while it was captured and checked before each replay.

During a capture the callable sees a recording view: it tells which fields were read. Host values read
there are frozen into the graph, so a replay under other values would silently be wrong. Knows nothing of
what fields mean. Invariant: a captured callable reads tensors from static buffers only, and never replays
under changed host values.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import torch

from ostinato.errors import CaptureError
from ostinato.padding import StepMode

V = TypeVar("V")

_PLAIN = (type(None), bool, int, float, str, enum.Enum, torch.dtype, torch.device)


class FrozenInputs:
    """The host inputs of one captured graph."""

    __slots__ = ("_buffers", "_recording", "_values", "_verdict")

    def __init__(self, verdict: Hashable = None) -> None:
        self._verdict = verdict
        self._buffers: dict[str, None] = {}
        self._values: dict[str, Any] = {}
        self._recording = True

    def watch(self, view: V, is_static: Callable[[str], bool]) -> V:
        """A copy of `view` (same type) that notes what is read of it until `seal` is called.

        `is_static` tells by name which fields are registered buffers. Reading any other tensor raises
        CaptureError: its address belongs to this one step.
        """
        cls = type(view)
        if not dataclasses.is_dataclass(cls):
            return view
        names = frozenset(field.name for field in dataclasses.fields(cls))

        def read(watched: object, name: str) -> Any:
            value = object.__getattribute__(watched, name)
            if self._recording and name in names:
                self._note(name, value, is_static)
            return value

        watcher = type(cls.__name__, (cls,), {"__slots__": (), "__getattribute__": read})
        watched: V = object.__new__(watcher)
        for name in names:
            object.__setattr__(watched, name, getattr(view, name))
        return watched

    def _note(self, name: str, value: Any, is_static: Callable[[str], bool]) -> None:
        if isinstance(value, torch.Tensor):
            if not is_static(name):
                raise CaptureError(
                    f"field {name!r} was read while capturing and is no static buffer, so replays would read "
                    "this step's memory; register a slot for it"
                )
            self._buffers[name] = None
        elif isinstance(value, (tuple, list)):
            if any(isinstance(part, torch.Tensor) for part in value):
                raise CaptureError(
                    f"field {name!r} was read while capturing and holds tensors of this one step; register a slot for "
                    "each"
                )
            self._values[name] = _of_key(value)
        elif isinstance(value, _PLAIN):
            self._values[name] = _of_key(value)

    def seal(self) -> None:
        """The capture is over: what is read from now on is not part of it."""
        self._recording = False

    def check(self, view: object, verdict: Hashable) -> None:
        """Raise CaptureError when a replay for `view` would not do what an eager step would do now."""
        if verdict != self._verdict:
            raise CaptureError(
                f"the graph was captured under verdict {self._verdict!r}, this step has {verdict!r}; make "
                "the verdict part of the variant in the graph key"
            )
        for name in self._buffers:
            if getattr(view, name) is None:
                raise CaptureError(
                    f"field {name!r} was a buffer when the graph was captured and is None now; give such "
                    "steps a variant of their own in the graph key"
                )
        for name, frozen in self._values.items():
            value = getattr(view, name)
            if value is not frozen and (isinstance(value, torch.Tensor) or _of_key(value) != frozen):
                raise CaptureError(
                    f"field {name!r} was {frozen!r} when the graph was captured and is {_short(value)} now; "
                    "pass it in a slot, or make it part of the graph key"
                )


def _of_key(value: Any) -> Any:
    """Modes that share a graph key count as one: the key tells extend from decode already. Lists are copied: who holds
    one may change it.
    """
    if isinstance(value, (tuple, list)):
        return tuple(map(_of_key, value))
    return value.is_extend if isinstance(value, StepMode) else value


def _short(value: object) -> str:
    return "a tensor" if isinstance(value, torch.Tensor) else repr(value)
