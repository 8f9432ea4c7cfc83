"""The command line: `ostinato generate | chat | bench | fetch`.

Fast to start: torch and the engine are imported inside commands, after the arguments were found good. Every
user's error is one line on stderr with the remedy and exit code 2; Ctrl-C exits with 130. What a command
answers goes to stdout, everything else to stderr.
"""

from __future__ import annotations

from ostinato.cli.app import app, main

__all__ = ["app", "main"]
