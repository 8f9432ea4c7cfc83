"""An error that ranks share while they load is told once, with their names."""

from __future__ import annotations

import pytest
from torch._C._distributed_c10d import HashStore

from ostinato.engine.load_reports import LoadReports
from ostinato.errors import ConfigError, ModelError, OstinatoError, ParallelError
from ostinato.parallel.topology import Topology

SHARED = ConfigError("3 heads cannot be shared out")
LAYOUT = Topology(4, 2, 4)


@pytest.mark.parametrize(
    ("own", "others", "kind", "text"),
    [
        (SHARED, [SHARED] * 3, ConfigError, "all 4 ranks: 3 heads cannot be shared out"),
        (
            SHARED,
            [SHARED, None, ModelError("no file")],
            ConfigError,
            "ranks 0, 1: 3 heads cannot be shared out; rank 3: no file",
        ),
        (ParallelError("rank 2 failed"), [None, ModelError("no file"), None], ModelError, "rank 2: no file"),
        (ParallelError("rank 2 failed"), [None] * 3, ParallelError, "rank 2 failed"),
    ],
)
def test_what_rank_0_says(
    own: OstinatoError, others: list[OstinatoError | None], kind: type[OstinatoError], text: str
) -> None:
    store = HashStore()
    for rank, error in enumerate(others, start=1):
        reports = LoadReports(LAYOUT.at(rank), store)
        if error is None:
            reports.loaded()
        else:
            assert reports.failed(error)
    found = LoadReports(LAYOUT, store).merged(own, linger_s=60)
    assert type(found) is kind
    assert str(found) == text


def test_who_says_nothing_is_not_waited_for_long() -> None:
    assert LoadReports(LAYOUT, HashStore()).merged(SHARED, linger_s=0) is SHARED
