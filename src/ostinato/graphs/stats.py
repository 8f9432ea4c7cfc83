"""Accounting of a runner: what was captured, replayed and run eager, and how many rows were pads.

Counts served steps only, so warm-ups and captures ahead of time do not show as work. Knows nothing of what
ran. Invariant: every served step is counted once, as a capture, a replay, or an eager step with its
reason.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any

from ostinato.padding import GraphKey, StepShape, align_up

FINE_SIZES = 256
COARSE = 32


@dataclass(slots=True)
class KeyStats:
    """One graph key. `captures` counts every capture, also those ahead of time; `advanced` is a part of `replays`.

    checked, mismatches: replays that were run again eagerly, and those that differed. quarantined: so none replays.
    """

    captures: int = 0
    replays: int = 0
    advanced: int = 0
    eager: int = 0
    real_rows: int = 0
    pad_rows: int = 0
    checked: int = 0
    mismatches: int = 0
    quarantined: bool = False


@dataclass(slots=True)
class GraphStats:
    """All keys of a runner, and the reasons why steps ran eager. `replay_s`: seconds within replays.

    sizes: served steps by their real rows, the most of any data-parallel rank: what a bucket has to hold. Above
        FINE_SIZES they are counted by multiples of COARSE.
    """

    keys: dict[GraphKey, KeyStats] = field(default_factory=dict)
    eager_reasons: dict[str, int] = field(default_factory=dict)
    replay_s: float = 0.0
    sizes: Counter[int] = field(default_factory=Counter)

    def count_capture(self, key: GraphKey) -> None:
        self._of(key).captures += 1

    def count_check(self, key: GraphKey, *, differs: bool) -> None:
        """A replay of `key` was compared with an eager run of the same step."""
        stats = self._of(key)
        stats.checked += 1
        stats.mismatches += differs

    def count_quarantine(self, key: GraphKey) -> None:
        self._of(key).quarantined = True

    def count_step(
        self,
        shape: StepShape,
        *,
        replay_s: float | None = None,
        eager_reason: str = "",
    ) -> None:
        """One served step: replayed in `replay_s` seconds, eager for a reason, or captured while it ran."""
        stats = self._count_rows(shape, 1)
        if replay_s is not None:
            stats.replays += 1
            self.replay_s += replay_s
        elif eager_reason:
            stats.eager += 1
            self.eager_reasons[eager_reason] = self.eager_reasons.get(eager_reason, 0) + 1

    def count_advances(self, shape: StepShape, steps: int, replay_s: float) -> None:
        """`steps` steps of one shape, each of which went on from the last one's buffers; `replay_s` seconds in all."""
        stats = self._count_rows(shape, steps)
        stats.replays += steps
        stats.advanced += steps
        self.replay_s += replay_s

    def _count_rows(self, shape: StepShape, steps: int) -> KeyStats:
        stats, raw, size = self._of(shape.key), shape.raw_num_tokens, max(shape.num_tokens)
        self.sizes[size if size <= FINE_SIZES else align_up(size, COARSE)] += steps
        stats.real_rows += steps * raw
        stats.pad_rows += steps * (shape.padded_num_tokens - raw)
        return stats

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

    @property
    def checked(self) -> int:
        return sum(k.checked for k in self.keys.values())

    @property
    def mismatches(self) -> int:
        return sum(k.mismatches for k in self.keys.values())

    @property
    def quarantined(self) -> list[GraphKey]:
        """Graphs that are out of use because one of their replays differed from an eager run."""
        return [key for key, k in self.keys.items() if k.quarantined]

    def reset(self) -> None:
        """Forget everything, captures included."""
        self.keys.clear()
        self.eager_reasons.clear()
        self.sizes.clear()
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
            "checked": self.checked,
            "mismatches": self.mismatches,
            "captured_never_replayed": [spell_key(key) for key in self.captured_never_replayed],
            "quarantined": [spell_key(key) for key in self.quarantined],
            "sizes": {str(size): steps for size, steps in sorted(self.sizes.items())},
            "keys": {spell_key(key): asdict(k) for key, k in sorted(self.keys.items())},
        }


def spell_key(key: GraphKey) -> str:
    """As people read it: "decode/8", "extend/64/variant"."""
    parts = [key.kind, str(key.size)]
    if key.stream_index:
        parts.append(f"stream{key.stream_index}")
    if key.variant:
        parts.append(key.variant)
    return "/".join(parts)
