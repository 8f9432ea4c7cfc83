"""What a run of `verify` found: places, findings, cells, checks and the report, as plain values.

Knows nothing of engines or of how a report is shown. Invariant: a report says what was run and what was not; it
survives JSON and back unchanged, so whoever shows it needs nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import msgspec

VERSION = 1
"""Of the JSON form; a reader of another version is refused."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where something is wrong, as closely as it is known.

    check: name of the check that saw it. mode: "decode", or "prefill-full", "prefill-breakable", "prefill-eager".
    bucket: width of the step, n: real rows in it; 0 where a check is not about a cell. rank: whose. layer: first one
    that differs, counted from 0. slot: static input, or other memory by name. row: first that differs, pads included.
    """

    check: str
    mode: str = ""
    bucket: int = 0
    n: int = 0
    rank: int = 0
    layer: int | None = None
    slot: str | None = None
    row: int | None = None

    def __str__(self) -> str:
        parts = [f"{self.mode} bucket {self.bucket}, n {self.n}" if self.mode else self.check]
        parts.append(f"rank {self.rank}")
        named = (("layer", self.layer), ("slot", self.slot), ("row", self.row))
        return ", ".join(parts + [f"{name} {value}" for name, value in named if value is not None])


@dataclass(frozen=True, slots=True)
class Finding:
    """One broken promise. max_abs: the largest difference, None where there is none to give, or it is no number."""

    place: Place
    what: str
    max_abs: float | None = None
    reproduce: str = ""

    def __post_init__(self) -> None:
        if self.max_abs is not None and not math.isfinite(self.max_abs):
            object.__setattr__(self, "max_abs", None)  # JSON has no such numbers


@dataclass(frozen=True, slots=True)
class Cell:
    """One (mode, bucket, n) of a check. checks: comparisons made in it, over all ranks."""

    mode: str
    bucket: int
    n: int
    checks: int
    findings: tuple[Finding, ...] = ()

    @property
    def passed(self) -> bool:
        return not self.findings


@dataclass(frozen=True, slots=True)
class CheckResult:
    """One check. cells_possible: how many cells there are; `notes` say how those that ran were picked.

    skipped: why it did not run, empty when it did. promise: what it proves when it passes, in a sentence.
    """

    name: str
    title: str
    promise: str
    cells: tuple[Cell, ...] = ()
    cells_possible: int = 0
    seconds: float = 0.0
    skipped: str = ""
    notes: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        """Also true of a check that was skipped: see `skipped`."""
        return all(cell.passed for cell in self.cells)

    @property
    def comparisons(self) -> int:
        return sum(cell.checks for cell in self.cells)

    @property
    def findings(self) -> tuple[Finding, ...]:
        return tuple(finding for cell in self.cells for finding in cell.findings)


@dataclass(frozen=True, slots=True)
class Report:
    """A whole run. Facts are names with values as a person reads them, in the order to show them in.

    started: seconds since 1970. command: what was typed, which runs all of it again.
    """

    model: str
    model_facts: dict[str, str] = field(default_factory=dict)
    deployment: dict[str, str] = field(default_factory=dict)
    machine: dict[str, str] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    command: str = ""
    started: float = 0.0
    seconds: float = 0.0
    checks: tuple[CheckResult, ...] = ()
    passed: bool = True
    version: int = VERSION

    def findings(self) -> Iterator[Finding]:
        """All of them, check by check."""
        for check in self.checks:
            yield from check.findings


def to_json(report: Report) -> bytes:
    """The report as indented JSON."""
    return msgspec.json.format(msgspec.json.encode(report), indent=2)


def from_json(data: bytes) -> Report:
    """What `to_json` wrote. Raises ValueError for anything else."""
    report = msgspec.json.decode(data, type=Report)
    if report.version != VERSION:
        raise ValueError(f"the report has version {report.version}, this reads {VERSION}; make it anew")
    return report
