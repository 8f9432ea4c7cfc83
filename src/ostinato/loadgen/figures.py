"""From outcomes to figures: latencies by percentile, rates, goodput, errors by kind.

Pure functions. Times come in as seconds and go out as milliseconds. Invariant: a failed request counts in `failed` and
`errors`, and in no latency, rate of tokens, or goodput.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from ostinato.errors import ConfigError
from ostinato.loadgen.client import Outcome

PERCENTILES = (50, 90, 99)
LIMITED = ("ttft", "tpot", "e2e")


@dataclass(frozen=True, slots=True)
class Latencies:
    """Seconds of one request that went well; None where there is nothing to measure.

    ttft: from when it was due to its first piece of text. itl: between pieces. tpot: from the first piece to the last,
    over the tokens after the first. e2e: to the end of the stream.
    """

    ttft: float | None
    tpot: float | None
    itl: tuple[float, ...]
    e2e: float

    @classmethod
    def of(cls, outcome: Outcome) -> Latencies:
        pieces = outcome.pieces
        decode = None
        if len(pieces) > 1 and outcome.output_tokens > 1:
            decode = (pieces[-1] - pieces[0]) / (outcome.output_tokens - 1)
        return cls(
            pieces[0] - outcome.start if pieces else None,
            decode,
            tuple(after - before for before, after in pairwise(pieces)),
            outcome.end - outcome.start,
        )

    def meets(self, limits: Mapping[str, float]) -> bool:
        """Whether it keeps all limits, in milliseconds by name; what could not be measured keeps any."""
        found = {"ttft": self.ttft, "tpot": self.tpot, "e2e": self.e2e}
        return all((found[name] or 0.0) * 1000 <= limit for name, limit in limits.items())


def parse_limits(given: Sequence[str]) -> dict[str, float]:
    """Limits in milliseconds from "ttft:500", "ttft:500,tpot:50" and the like. Raises ConfigError."""
    limits: dict[str, float] = {}
    for text in (part for entry in given for part in entry.replace(",", " ").split()):
        name, _, value = text.partition(":")
        try:
            limits[name] = float(value)
        except ValueError:
            limits[name] = 0.0
        if name not in LIMITED or not 0 < limits[name] < float("inf"):
            raise ConfigError(f"--slo {text!r} is no limit; give {', '.join(LIMITED)} with ms, like ttft:500")
    return limits


def summarise(outcomes: Sequence[Outcome], limits: Mapping[str, float]) -> dict[str, Any]:
    """All figures as plain values. Times are milliseconds, rates per second from the first start to the last end."""
    good = [outcome for outcome in outcomes if outcome.error is None]
    seconds = max(o.end for o in outcomes) - min(o.start for o in outcomes) if outcomes else 0.0
    latencies = [Latencies.of(outcome) for outcome in good]
    prompt, output = sum(o.prompt_tokens for o in good), sum(o.output_tokens for o in good)
    kept = sum(one.meets(limits) for one in latencies)
    mean, most = in_flight(outcomes)
    return {
        "requests": len(outcomes),
        "completed": len(good),
        "failed": len(outcomes) - len(good),
        "errors": _errors(outcomes),
        "seconds": seconds,
        "prompt_tokens": prompt,
        "output_tokens": output,
        "requests_per_s": _rate(len(good), seconds),
        "output_tokens_per_s": _rate(output, seconds),
        "total_tokens_per_s": _rate(prompt + output, seconds),
        "in_flight": {"mean": mean, "most": most},
        "ttft_ms": spread([one.ttft for one in latencies if one.ttft is not None]),
        "tpot_ms": spread([one.tpot for one in latencies if one.tpot is not None]),
        "itl_ms": spread([gap for one in latencies for gap in one.itl]),
        "e2e_ms": spread([one.e2e for one in latencies]),
        "goodput": {
            "limits_ms": dict(limits),
            "requests": kept,
            "share": kept / len(outcomes) if outcomes else 0.0,
            "requests_per_s": _rate(kept, seconds),
        }
        if limits
        else None,
    }


def spread(seconds: Sequence[float]) -> dict[str, float] | None:
    """Mean, percentiles (interpolated) and most of some durations, in milliseconds; None of none."""
    if not seconds:
        return None
    values = np.asarray(seconds) * 1000
    found = {f"p{p}": float(v) for p, v in zip(PERCENTILES, np.percentile(values, PERCENTILES), strict=True)}
    return {"mean": float(values.mean())} | found | {"most": float(values.max())}


def in_flight(outcomes: Sequence[Outcome]) -> tuple[float, int]:
    """Requests under way at a time: mean over the whole time, and most."""
    if not outcomes:
        return 0.0, 0
    first, last = min(o.start for o in outcomes), max(o.end for o in outcomes)
    # At the same moment ends come before starts: a worker's next request does not overlap its last one.
    changes = sorted([(o.end, -1) for o in outcomes] + [(o.start, 1) for o in outcomes])
    now = most = 0
    for _, change in changes:
        now += change
        most = max(most, now)
    total = sum(o.end - o.start for o in outcomes)
    return _rate(total, last - first), most


def _errors(outcomes: Sequence[Outcome]) -> dict[str, dict[str, Any]]:
    """Count and first words of each kind of fault, the most frequent first."""
    errors: dict[str, dict[str, Any]] = {}
    for outcome in outcomes:
        if outcome.error is not None:
            errors.setdefault(outcome.error, {"count": 0, "first": outcome.message})["count"] += 1
    return dict(sorted(errors.items(), key=lambda item: -item[1]["count"]))


def _rate(amount: float, seconds: float) -> float:
    return amount / seconds if seconds > 0 else 0.0
