"""`ostinato verify`: prove a checkpoint in a deployment; a table for people, JSON and HTML to keep.

Must not import torch or the engine before the arguments were found good. Invariant: the exit code is 0 when everything
that ran has passed, 1 when something has not, 2 for input that cannot be verified.
"""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ostinato.cli.flags import engine_flags
from ostinato.cli.generate import MODEL_HELP
from ostinato.cli.screen import check_writable, lasting
from ostinato.config import EngineConfig
from ostinato.engine.progress import bars, is_interactive
from ostinato.errors import ConfigError

if TYPE_CHECKING:
    from ostinato.verify.findings import Report
    from ostinato.verify.run import Plan, Progress

FAILED = 1


@engine_flags
def verify(
    *,
    model: Annotated[str | None, typer.Option("--model", "-m", help=MODEL_HELP)] = None,
    budget: Annotated[
        float, typer.Option(min=0.0, help="Seconds to spend on cells; every check runs one at least.")
    ] = 100.0,
    only: Annotated[
        list[str] | None, typer.Option(help="Run this check alone (repeatable).", show_default=False)
    ] = None,
    cell: Annotated[
        str | None, typer.Option(help="Run this cell alone, like decode:8:5 (mode, bucket, real rows).")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Decides cells, requests and their tokens.")] = 0,
    inject: Annotated[
        str | None,
        typer.Option(help="Break the deployment on purpose first: fault, fault:rank or fault:rank:layer."),
    ] = None,
    reference: Annotated[
        str, typer.Option(help="Compare with transformers where it is installed (auto|off).")
    ] = "auto",
    prompt: Annotated[
        list[str] | None,
        typer.Option(help="Prompt to compare with transformers (repeatable).", show_default=False),
    ] = None,
    prompts: Annotated[
        Path | None, typer.Option(help="File of such prompts, one a line.", show_default=False)
    ] = None,
    as_json: Annotated[Path | None, typer.Option("--json", help="Write the report there as JSON.")] = None,
    html: Annotated[
        Path | None, typer.Option("--html", help="Write the report there as one HTML page.")
    ] = None,
    engine: dict[str, Any],
) -> None:
    """Prove that a checkpoint in a deployment computes what it should, whatever is around a request."""
    config = EngineConfig.of(model=model, **engine)
    check_writable(as_json, html)
    if reference not in ("auto", "off"):
        raise ConfigError(f"reference {reference!r} is unknown; give auto or off")
    with lasting():
        from ostinato.verify.faults import Injection
        from ostinato.verify.reference import given_prompts
        from ostinato.verify.run import Plan, known_checks
    asked = [word for text in prompt or () for word in ("--prompt", text)]
    asked += ["--prompts", str(prompts.absolute())] if prompts else []
    plan = Plan(
        budget=budget,
        only=known_checks(only or ()),
        cell=cell,
        seed=seed,
        prompts=given_prompts(prompt or (), prompts),
        reference=reference == "auto",
        inject=None if inject is None else Injection.parse(inject),
        reproduce=again(model, engine, seed, inject, asked),
    )
    report = run(config, plan, " ".join(map(shlex.quote, ["ostinato", *sys.argv[1:]])))
    show_and_keep(report, as_json, html)
    if not report.passed:
        raise typer.Exit(FAILED)


def again(
    model: str | None, engine: dict[str, Any], seed: int, inject: str | None, asked: Sequence[str] = ()
) -> Callable[[str, str], str]:
    """(check, cell) -> the command that runs it again; an empty cell for checks that have none.

    asked: the options that name prompts.
    """
    words = command_line(model, engine, seed) + (f" --inject {shlex.quote(inject)}" if inject else "")
    words += "".join(f" {shlex.quote(word)}" for word in asked)
    return lambda check, cell: f"{words} --only {check}" + (f" --cell {cell}" if cell else "")


def command_line(model: str | None, engine: dict[str, Any], seed: int) -> str:
    """The command that makes the same deployment, without what to run in it."""
    words = ["ostinato", "verify"]
    if model is not None:
        words += ["--model", model]
    for name, value in engine.items():
        words += _flag(name, value)
    if seed:
        words += ["--seed", str(seed)]
    return " ".join(map(shlex.quote, words))


def _flag(name: str, value: Any) -> list[str]:
    spelled = next(spec.metadata["flag"] for spec in fields(EngineConfig) if spec.name == name)
    flag = spelled if isinstance(spelled, str) else name
    if value is True:
        return [f"--{flag.replace('_', '-')}"]
    if value is False:
        return [f"--no-{flag.removeprefix('enable_').replace('_', '-')}"]
    text = ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
    return [f"--{flag.replace('_', '-')}", text]


def run(config: EngineConfig, plan: Plan, command: str) -> Report:
    """Open the deployment, verify it, close it."""
    with lasting():
        from ostinato.engine.front import open_engine
        from ostinato.verify import describe
        from ostinato.verify.findings import Report
        from ostinato.verify.program import program
        from ostinato.verify.run import Run
    started, clock = time.time(), time.monotonic()
    with bars(shown=config.progress) as report:
        engine = open_engine(config, report, program())
    try:
        with progress(config.progress) as tell:
            verification = Run(engine, plan)
            verification.cells(tell)
            verification.compare()
        checks = verification.results()
        return Report(
            model=config.model or "demo",
            model_facts=describe.model_facts(engine),
            deployment=describe.deployment_facts(engine, verification.facts),
            machine=describe.machine_facts(),
            versions=describe.versions(),
            command=command,
            started=started,
            seconds=time.monotonic() - clock,
            checks=checks,
            passed=all(check.passed for check in checks)
            and any(check.comparisons for check in checks)
            and not verification.broken,
        )
    finally:
        engine.close()


@contextmanager
def progress(shown: bool) -> Iterator[Progress]:
    """A bar for people: the share of the run, the check in hand, and failures so far."""
    if not (shown and is_interactive()):
        yield lambda title, failed, share: None
        return
    with bars() as report:

        def tell(title: str, failed: int, share: float) -> None:
            stage = "Verifying" if not failed else "Verifying (something has failed)"
            report(stage, round(1000 * share), 1000)

        yield tell


def show_and_keep(report: Report, as_json: Path | None, html: Path | None) -> None:
    """Write the files that were asked for, and print the report."""
    if as_json is not None:
        from ostinato.verify.findings import to_json

        as_json.write_bytes(to_json(report) + b"\n")
    if html is not None:
        from ostinato.verify.html import render

        html.write_text(render(report), encoding="utf-8")
    from rich.console import Console

    from ostinato.verify.text import show

    show(report, Console())
