"""Accounting of a runner: what was captured, replayed and run eager, and how many rows were pads.

Counts served steps only, so warm-ups and captures ahead of time do not show as work. Knows nothing of what
ran. Invariant: every served step is counted once, as a capture, a replay, or an eager step with its
reason.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ostinato.padding import GraphKey, StepShape


@dataclass(slots=True)
class KeyStats:
    """One graph key. `captures` counts every capture, also those ahead of time; `advanced` is a part of `replays`."""

    captures: int = 0
    replays: int = 0
    advanced: int = 0
    eager: int = 0
    real_rows: int = 0
    pad_rows: int = 0


@dataclass(slots=True)
class GraphStats:
    """All keys of a runner, and the reasons why steps ran eager. `replay_s`: seconds within replays."""

    keys: dict[GraphKey, KeyStats] = field(default_factory=dict)
    eager_reasons: dict[str, int] = field(default_factory=dict)
    replay_s: float = 0.0

    def count_capture(self, key: GraphKey) -> None:
        self._of(key).captures += 1

    def count_step(
        self,
        shape: StepShape,
        *,
        replay_s: float | None = None,
        advanced: bool = False,
        eager_reason: str = "",
    ) -> None:
        """One served step: replayed in `replay_s` seconds, eager for a reason, or captured while it ran."""
        stats = self._of(shape.key)
        raw = shape.raw_num_tokens
        stats.real_rows += raw
        stats.pad_rows += shape.padded_num_tokens - raw
        if replay_s is not None:
            stats.replays += 1
            stats.advanced += advanced
            self.replay_s += replay_s
        elif eager_reason:
            stats.eager += 1
            self.eager_reasons[eager_reason] = self.eager_reasons.get(eager_reason, 0) + 1

    def _of(self, key: GraphKey) -> KeyStats:
        stats = self.keys.get(key)
        if stats is None:
            stats = self.keys[key] = KeyStats()
        return stats

    @property
    def captures(self) -> int:
        return sum(k.captures for k in self.keys.values())

    @property
    def replays(self) -> int:
        return sum(k.replays for k in self.keys.values())

    @property
    def advanced(self) -> int:
        return sum(k.advanced for k in self.keys.values())

    @property
    def eager_steps(self) -> int:
        return sum(self.eager_reasons.values())

    @property
    def real_rows(self) -> int:
        return sum(k.real_rows for k in self.keys.values())

    @property
    def pad_rows(self) -> int:
        return sum(k.pad_rows for k in self.keys.values())

    @property
    def captured_never_replayed(self) -> list[GraphKey]:
        """Graphs that cost a capture and served nothing afterwards: a mode or a key that never matches."""
        return [key for key, k in self.keys.items() if k.captures and not k.replays]

    def reset(self) -> None:
        """Forget everything, captures included."""
        self.keys.clear()
        self.eager_reasons.clear()
        self.replay_s = 0.0

    def as_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON; keys are spelled "decode/8" or "extend/64/variant"."""
        return {
            "captures": self.captures,
            "replays": self.replays,
            "advanced": self.advanced,
            "replay_s": self.replay_s,
            "eager_steps": self.eager_steps,
            "eager_reasons": dict(self.eager_reasons),
            "real_rows": self.real_rows,
            "pad_rows": self.pad_rows,
            "captured_never_replayed": [_spell(key) for key in self.captured_never_replayed],
            "keys": {
                _spell(key): {
                    "captures": k.captures,
                    "replays": k.replays,
                    "advanced": k.advanced,
                    "eager": k.eager,
                    "real_rows": k.real_rows,
                    "pad_rows": k.pad_rows,
                }
                for key, k in sorted(self.keys.items())
            },
        }


def _spell(key: GraphKey) -> str:
    parts = [key.kind, str(key.size)]
    if key.stream_index:
        parts.append(f"stream{key.stream_index}")
    if key.variant:
        parts.append(key.variant)
    return "/".join(parts)
