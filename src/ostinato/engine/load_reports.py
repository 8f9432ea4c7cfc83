"""What ranks say of their loading, so that a fault which they share is told once, by rank 0.

    rank r: loaded, or its error ──store──▶ rank 0: one error that names the ranks

Knows nothing of what they load. Invariant: an error is told by the rank that has it or by rank 0, never by both.
"""

from __future__ import annotations

import json
import time

from torch._C._distributed_c10d import PrefixStore, Store

from ostinato import errors
from ostinato.errors import OstinatoError, ParallelError
from ostinato.parallel.topology import Topology

LINGER_S = 2.0
"""How long rank 0, whose own loading has failed, waits to hear whether the others' has."""

_LOOK_S = 0.02


class LoadReports:
    """The reports of all ranks of a layout, kept by `store`."""

    def __init__(self, topology: Topology, store: Store) -> None:
        self._topology = topology
        self._store = PrefixStore("loaded", store)

    def loaded(self) -> None:
        """Say that this rank is ready."""
        self._tell([])

    def failed(self, error: OstinatoError) -> bool:
        """Leave it to rank 0 to tell of this rank's error; whether that has been heard."""
        return self._tell([type(error).__name__, str(error)])

    def merged(self, error: OstinatoError, linger_s: float = LINGER_S) -> OstinatoError:
        """Rank 0: its own error while all ranks load, or that another one failed, with what the others have said."""
        others = self._heard(linger_s)
        told = {rank: (name, text) for rank, (name, text) in others.items() if name}
        if not told:
            return error
        # That others failed is not news beside what they say.
        mine = {} if isinstance(error, ParallelError) else {0: (type(error).__name__, str(error))}
        groups: dict[tuple[str, str], list[int]] = {}
        for rank, what in {**mine, **told}.items():
            groups.setdefault(what, []).append(rank)
        text = "; ".join(f"{self._names(ranks)}: {text}" for (_, text), ranks in groups.items())
        kind = getattr(errors, next(iter(groups))[0], ParallelError)
        made: OstinatoError = kind(text)
        return made

    def _tell(self, what: list[str]) -> bool:
        try:
            self._store.set(str(self._topology.rank), json.dumps(what))
        except RuntimeError:  # the store has gone with rank 0
            return False
        return True

    def _heard(self, linger_s: float) -> dict[int, tuple[str, str]]:
        """(class, text) of each rank's error, empty of those that are ready; waits for all, but not for long."""
        heard: dict[int, tuple[str, str]] = {}
        end = time.monotonic() + linger_s
        while True:
            for rank in range(1, self._topology.tp):
                if rank not in heard and self._store.check([str(rank)]):
                    name, text = json.loads(self._store.get(str(rank))) or ("", "")
                    heard[rank] = name, text
            if len(heard) == self._topology.tp - 1 or time.monotonic() > end:
                return heard
            time.sleep(_LOOK_S)

    def _names(self, ranks: list[int]) -> str:
        if len(ranks) == self._topology.tp:
            return f"all {len(ranks)} ranks"
        return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
