"""A rank's own process under `ostinato verify`: as `python -m ostinato.engine.rank`, and can be asked to verify."""

from __future__ import annotations

import sys

from ostinato.engine.rank import main
from ostinato.verify.program import program

if __name__ == "__main__":
    sys.exit(main(program()))
