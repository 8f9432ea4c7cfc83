"""Waiting for ranks that have not come yet: the store's own way waits for minutes and sees nothing meanwhile.

Knows nothing of what the ranks meet for. Invariant: whoever waits hears of a rank that has ended as soon as `check`
knows, and names those that did not come.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from torch._C._distributed_c10d import Store

from ostinato.errors import ParallelError

MEETING_S = 300.0
"""A rank's start takes seconds, on a busy machine some minutes."""

_LOOK_S = 0.005


def wait_for_ranks(store: Store, keys: Mapping[str, int], check: Callable[[], None]) -> None:
    """Wait until every key is in `store`, each set by the rank it stands beside; `check` is called meanwhile.

    Raises what `check` does, and ParallelError for ranks that have not come within MEETING_S or a store that is gone.
    """
    deadline = time.monotonic() + MEETING_S
    missing = dict(keys)
    while True:
        missing = {key: rank for key, rank in missing.items() if not _is_there(store, key)}
        if not missing:
            return
        check()
        if time.monotonic() > deadline:
            names = ", ".join(str(rank) for rank in sorted(set(missing.values())))
            raise ParallelError(
                f"rank {names} did not come within {MEETING_S:g} s; it hangs or is gone: look at its output"
            )
        time.sleep(_LOOK_S)


def _is_there(store: Store, key: str) -> bool:
    try:
        return bool(store.check([key]))
    except RuntimeError as error:
        raise ParallelError("rank 0, where the ranks meet, is gone: look at its output") from error
