"""The `ostinato` command of a broken build: `python -m broken_ostinato serve …`, with this directory on PYTHONPATH.

Fault `frozen-input` of `ostinato verify`: what a graph replays in layer 1 are the rows that it was captured over; eager
steps are right. The server is the real one and starts this module again, without arguments, as its engine process. No
option of the real command leads here.
"""

from __future__ import annotations

import sys
from functools import partial

from ostinato import cli
from ostinato.engine import rerun
from ostinato.engine.engine import Engine
from ostinato.server import engine_process, run
from ostinato.verify.faults import Injection
from ostinato.verify.seam import Seam, Serves

FAULT = Injection.parse("frozen-input:0:1")


def put(engine: Engine) -> None:
    """The fault into an engine that has served nothing yet."""
    FAULT.fault.put(Seam(Serves(engine.worker)), FAULT.layer)


def main() -> int:
    if len(sys.argv) == 1:
        return engine_process.main(put)
    run.serve = partial(run.serve, engine_module="broken_ostinato")
    rerun.rerun = partial(rerun.rerun, opened=put)
    cli.main()
    return 0


if __name__ == "__main__":
    sys.exit(main())
