"""`ostinato serve`: the OpenAI-compatible server, until a signal ends it.

Must not import the server or the engine before the arguments were found good.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any

import typer

from ostinato.cli.flags import engine_flags, server_flags
from ostinato.cli.generate import MODEL_HELP
from ostinato.config import EngineConfig, ServerConfig, launched_rank


@engine_flags
@server_flags
def serve(
    *,
    model: Annotated[str | None, typer.Option("--model", "-m", help=MODEL_HELP)] = None,
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            help="Key that clients must send (repeatable); better: OSTINATO_API_KEY.", show_default=False
        ),
    ] = None,
    cors_origin: Annotated[
        list[str] | None,
        typer.Option(help="Origin whose pages may call the API (repeatable).", show_default=False),
    ] = None,
    server: dict[str, Any],
    engine: dict[str, Any],
) -> None:
    """Serve a model over HTTP, as OpenAI's API."""
    config = EngineConfig.of(model=model, **engine)
    options = ServerConfig.of(
        api_keys=tuple(api_key) if api_key else None,
        cors_origins=tuple(cors_origin) if cors_origin else None,
        **server,
    )
    launched = launched_rank()
    if launched is not None:
        # An engine started anew could not meet ranks that outlived the last one; torchrun starts all of them again.
        options = replace(options, max_restarts=0)
    if launched is not None and launched.rank:
        # One rank listens; the others serve it, and end here with it.
        from ostinato.engine.llm import LLM

        LLM(config=config)
    from ostinato.server import run

    raise typer.Exit(run.serve(config, options))
