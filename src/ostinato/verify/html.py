"""A report of `verify` as one HTML page that needs nothing else: no script, font or picture from elsewhere.

Heat maps of bucket by n, findings with the command that runs their cell, and the report itself as embedded JSON. Knows
nothing of how checks work. Invariant: all that is shown comes from the `Report`, and text in it can't become markup.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from jinja2 import Environment, FileSystemLoader

from ostinato.verify.findings import Cell, CheckResult, Finding, Report, to_json

CELL, GAP, GUTTER, TOP = 13, 2, 56, 36
MAX_COLUMNS = 120
"""More than these would make a map too wide to read: columns are then thinned, cells with findings kept."""
MAX_FINDINGS = 40


@dataclass(frozen=True, slots=True)
class Mark:
    """A label at a pixel: `at` is x of a column's middle, or y of a row's top."""

    x: int
    y: int
    text: str


@dataclass(frozen=True, slots=True)
class Square:
    """One cell of a map. tone: "ok", "no" or "rest" (not run)."""

    x: int
    y: int
    tone: str
    title: str


@dataclass(frozen=True, slots=True)
class HeatMap:
    """One mode of one check: a row for each bucket, a column for each n that ran in any of them."""

    mode: str
    label: str
    width: int
    height: int
    columns: tuple[Mark, ...]
    rows: tuple[Mark, ...]
    cells: tuple[Square, ...]
    size: int = CELL
    gutter: int = GUTTER


@dataclass(frozen=True, slots=True)
class CheckView:
    """A check as the page shows it."""

    name: str
    title: str
    promise: str
    verdict: str
    tone: str
    run: int
    possible: int
    seconds: float
    skipped: str
    notes: tuple[str, ...]
    maps: tuple[HeatMap, ...]
    open: bool


@dataclass(frozen=True, slots=True)
class FindingView:
    """A finding as the page shows it."""

    what: str
    where: str
    max_abs: str | None
    reproduce: str


def render(report: Report) -> str:
    """The page. Its `<script type="application/json" id="report">` holds what `findings.from_json` reads."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    return environment.get_template("report.html.j2").render(
        report=report,
        headline=_headline(report),
        totals=_totals(report),
        facts=_facts(report),
        findings=[_finding(finding) for finding in report.findings()],
        shown=MAX_FINDINGS,
        checks=[_check(check, first=check is report.checks[0]) for check in report.checks],
        started=_time(report.started),
        embedded=_script_safe(to_json(report).decode()),
    )


def heat_maps(cells: Sequence[Cell]) -> tuple[HeatMap, ...]:
    """Maps of the cells that are about a step, one for each mode, in the order in which modes come."""
    modes = dict.fromkeys(cell.mode for cell in cells if cell.bucket)
    return tuple(_map(mode, [cell for cell in cells if cell.mode == mode and cell.bucket]) for mode in modes)


def _map(mode: str, cells: list[Cell]) -> HeatMap:
    columns = _columns(cells)
    at = {n: GUTTER + i * (CELL + GAP) for i, n in enumerate(columns)}
    buckets = sorted({cell.bucket for cell in cells})
    squares: list[Square] = []
    for i, bucket in enumerate(buckets):
        y = TOP + i * (CELL + GAP)
        for n in columns:
            if n <= bucket:
                here = [cell for cell in cells if (cell.bucket, cell.n) == (bucket, n)]
                squares.append(_square(at[n], y, mode, bucket, n, here))
    wrong = sum(not cell.passed for cell in cells)
    return HeatMap(
        mode=mode,
        label=f"{mode}: {len(cells)} cells of bucket by n, {wrong} wrong",
        width=max(GUTTER + len(columns) * (CELL + GAP) + 16, 260),
        height=TOP + len(buckets) * (CELL + GAP),
        columns=tuple(Mark(at[n] + CELL // 2, 0, str(n)) for n in _labelled(columns)),
        rows=tuple(Mark(0, TOP + i * (CELL + GAP), str(bucket)) for i, bucket in enumerate(buckets)),
        cells=tuple(squares),
    )


def _columns(cells: list[Cell]) -> list[int]:
    every = sorted({cell.n for cell in cells})
    if len(every) <= MAX_COLUMNS:
        return every
    wrong = {cell.n for cell in cells if not cell.passed}
    step = -(-len(every) // MAX_COLUMNS)
    return [n for i, n in enumerate(every) if i % step == 0 or n in wrong]


def _labelled(columns: list[int]) -> list[int]:
    """Columns that have room for their number: labels of up to four digits want some 28 pixels."""
    digits = len(str(columns[-1]))
    step = 1 if digits == 1 else 2 if digits <= 3 else 3
    return columns[::step]


def _square(x: int, y: int, mode: str, bucket: int, n: int, here: list[Cell]) -> Square:
    where = f"{mode}, bucket {bucket}, n {n}"
    if not here:
        return Square(x, y, "rest", f"{where}: not run")
    wrong = [finding for cell in here for finding in cell.findings]
    if wrong:
        return Square(x, y, "no", f"{where}: {wrong[0].what} ({wrong[0].place})")
    return Square(x, y, "ok", f"{where}: {sum(cell.checks for cell in here)} comparisons, all equal")


def _check(check: CheckResult, *, first: bool) -> CheckView:
    if check.skipped:
        verdict, tone = "not run", "rest"
    elif check.passed:
        verdict, tone = "✓ passed", "ok"
    else:
        count = len(check.findings)
        verdict, tone = f"✗ {count} finding{'s' if count > 1 else ''}", "no"
    return CheckView(
        name=check.name,
        title=check.title,
        promise=check.promise,
        verdict=verdict,
        tone=tone,
        run=len(check.cells),
        possible=check.cells_possible,
        seconds=check.seconds,
        skipped=check.skipped,
        notes=check.notes,
        maps=heat_maps(check.cells),
        open=first or not check.passed,
    )


def _finding(finding: Finding) -> FindingView:
    largest = None if finding.max_abs is None else f"{finding.max_abs:.3g}"
    return FindingView(finding.what, f"{finding.place.check}: {finding.place}", largest, finding.reproduce)


def _headline(report: Report) -> str:
    ran = [check for check in report.checks if not check.skipped]
    if report.passed:
        return "Passed: nothing around a request changes its answer" if len(ran) > 1 else "Passed"
    wrong = sum(not check.passed for check in report.checks)
    total = sum(1 for _ in report.findings())
    return f"Failed: {total} finding{'s' * (total != 1)} in {wrong} check{'s' * (wrong != 1)}"


def _totals(report: Report) -> str:
    comparisons = sum(check.comparisons for check in report.checks)
    cells = sum(len(check.cells) for check in report.checks)
    ran = sum(not check.skipped for check in report.checks)
    return f"{ran} checks, {cells:,} cells, {comparisons:,} comparisons in {report.seconds:.0f} s"


def _facts(report: Report) -> list[tuple[str, str]]:
    groups = (report.model_facts, report.deployment, report.machine, report.versions)
    return [(name.replace("_", " "), value) for group in groups for name, value in group.items() if value]


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M UTC")


def _script_safe(text: str) -> str:
    """JSON whose text cannot end the script element it lies in."""
    return text.replace("<", "\\u003c")
