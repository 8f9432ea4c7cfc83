"""The typer application: its commands, and the one place where an error becomes a line and an exit code.

Must not import torch or the engine. Invariant: no traceback for what a user did; a bug keeps its traceback.
"""

from __future__ import annotations

import gc
import sys
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from ostinato import __version__
from ostinato.cli import bench, bench_serve, buckets, chat, fetch, generate, replay_trace, serve, verify
from ostinato.errors import OstinatoError

# Root of what the parser raises at users; typer has no public name for it.
_UsageError: type[Exception] = typer.BadParameter.__bases__[0]

USER_ERROR = 2
INTERRUPTED = 130


class _Group(TyperGroup):
    """Runs a command and turns its outcome into an exit code."""

    def main(self, *args: Any, **extra: Any) -> Any:
        extra["standalone_mode"] = False
        try:
            code = super().main(*args, **extra)
        except OstinatoError as error:
            code = _fail(str(error))
        except _UsageError as error:
            code = _fail(_usage(error))
        except (KeyboardInterrupt, typer.Abort):
            code = INTERRUPTED
        except OSError as error:
            code = _fail(f"{error.strerror or error}{f': {error.filename}' if error.filename else ''}")
        sys.exit(code if isinstance(code, int) else 0)


def _fail(message: str) -> int:
    print(f"ostinato: error: {' '.join(message.split())}", file=sys.stderr)
    return USER_ERROR


def _usage(error: Any) -> str:
    """The parser's message, and where to read more."""
    context = getattr(error, "ctx", None)
    path = context.command_path if context is not None else "ostinato"
    message = error.format_message().rstrip(".")
    return f"{message}{' See' if message.endswith('?') else '; see'} `{path} --help`"


class _BenchGroup(TyperGroup):
    """`bench` measures an engine unless another of its commands is named."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if not args or args[0] not in (*self.commands, *ctx.help_option_names):
            args = ["engine", *args]
        return super().parse_args(ctx, args)


app = typer.Typer(
    cls=_Group,
    name="ostinato",
    help="LLM inference whose answers repeat exactly, whatever is played around them.",
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"ostinato {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    if context.invoked_subcommand is None:
        print(context.get_help())


bench_app = typer.Typer(
    cls=_BenchGroup,
    help="Measure an engine, or a server under load. `ostinato bench` alone is `ostinato bench engine`, "
    "`ostinato bench kernels` is `ostinato bench engine kernels`, and so on.",
)
bench_app.command("engine")(bench.bench)
bench_app.command("serve")(bench_serve.bench_serve)
bench_app.command("buckets")(buckets.bench_buckets)

app.command("generate")(generate.generate)
app.command("chat")(chat.chat)
app.command("serve")(serve.serve)
app.command("fetch")(fetch.fetch)
app.command("replay-trace")(replay_trace.replay_trace)
app.command("verify")(verify.verify)
app.add_typer(bench_app, name="bench")


def main() -> None:
    """Entry point of the `ostinato` script."""
    try:
        app(prog_name="ostinato")
    finally:
        gc.freeze()  # else the interpreter's last collection walks over all of torch, to no end
