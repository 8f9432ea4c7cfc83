"""A report on a terminal: what was verified, a table of checks, the findings, and a verdict.

Shows values of findings.py and knows nothing else. Invariant: whatever did not run is said, with its reason.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from ostinato.verify.findings import CheckResult, Finding, Report

MOST_FINDINGS = 12
WIDE = 110
"""Columns from which on a check's promise stands beside it."""


def show(report: Report, console: Console) -> None:
    """Print all of it."""
    console.print(_head(report))
    console.print(_checks(report, promises=console.width >= WIDE))
    for note in dict.fromkeys(note for check in report.checks for note in check.notes):
        titles = [check.title for check in report.checks if note in check.notes]
        console.print(Text(f"{', '.join(titles)}: {note}", style="dim"))
    findings = list(report.findings())
    for finding in findings[:MOST_FINDINGS]:
        console.print(_finding(finding))
    if len(findings) > MOST_FINDINGS:
        console.print(
            Text(f"… and {len(findings) - MOST_FINDINGS} findings more; --json FILE holds all", style="dim")
        )
    console.print(_verdict(report, findings))


def _head(report: Report) -> RenderableType:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim")
    table.add_column(overflow="fold")
    model = report.model_facts
    table.add_row("model", f"{report.model} ({_line(model, ('family', 'dtype', 'layers', 'experts'))})")
    table.add_row("deployment", _line(report.deployment, tuple(report.deployment)))
    table.add_row(
        "machine", f"{report.machine.get('processor', '')}, {report.machine.get('cores', '')} cores"
    )
    table.add_row("versions", ", ".join(f"{name} {value}" for name, value in report.versions.items()))
    return Panel(table, title="ostinato verify", title_align="left", border_style="dim")


def _line(facts: Mapping[str, str], names: tuple[str, ...]) -> str:
    own = ("family", "dtype", "layout")
    return "; ".join(facts[n] if n in own else f"{n} {facts[n]}" for n in names if n in facts)


def _checks(report: Report, *, promises: bool) -> Table:
    table = Table(
        "",
        "check",
        "cells",
        "comparisons",
        "time",
        "proves" if promises else "",
        box=None,
        padding=(0, 1),
        header_style="dim",
    )
    for right in (2, 3, 4):
        table.columns[right].justify = "right"
    for check in report.checks:
        mark, style = _mark(check)
        if check.skipped:
            table.add_row(
                Text(mark, style), check.title, "", "", "", Text(f"skipped: {check.skipped}", style="dim")
            )
            continue
        cells = (
            f"{len(check.cells)} of {check.cells_possible}" if check.cells_possible else str(len(check.cells))
        )
        table.add_row(
            Text(mark, style),
            check.title,
            cells,
            str(check.comparisons),
            f"{check.seconds:.1f} s",
            check.promise if promises else "",
        )
    return table


def _mark(check: CheckResult) -> tuple[str, str]:
    if check.skipped:
        return "–", "dim"
    return ("✓", "bold green") if check.passed else ("✗", "bold red")


def _finding(finding: Finding) -> RenderableType:
    gap = "" if finding.max_abs is None else f" (by up to {finding.max_abs:.3g})"
    return Group(
        Text.assemble(("✗ ", "bold red"), (str(finding.place), "bold")),
        Text(f"  {finding.what}{gap}"),
        Text(f"  again: {finding.reproduce}", style="dim"),
    )


def _verdict(report: Report, findings: list[Finding]) -> RenderableType:
    ran = [check for check in report.checks if not check.skipped]
    cells, comparisons = sum(len(c.cells) for c in ran), sum(c.comparisons for c in ran)
    if not comparisons and not findings:
        return Panel(Text("NOTHING RAN, so nothing is proved.", style="bold yellow"), border_style="yellow")
    if report.passed:
        what = f"PASSED  {comparisons} comparisons in {cells} cells, {report.seconds:.0f} s: no bit out of place."
        return Panel(Text(what, style="bold green"), border_style="green")
    places = Counter(_where(finding) for finding in findings)
    worst = ", ".join(place for place, _ in places.most_common(3))
    found = "1 finding" if len(findings) == 1 else f"{len(findings)} findings"
    ran_in = "1 cell" if cells == 1 else f"{cells} cells"
    what = f"FAILED  {found} in {ran_in}, {report.seconds:.0f} s. Where: {worst}."
    return Panel(Text(what, style="bold red"), border_style="red")


def _where(finding: Finding) -> str:
    place = finding.place
    parts = [place.mode or place.check, f"rank {place.rank}"]
    parts += [f"layer {place.layer}"] if place.layer is not None else []
    return " ".join(parts + ([place.slot] if place.slot else []))
