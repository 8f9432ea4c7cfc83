"""Layouts and placements that cannot be are refused with the value and the remedy, before any process is started."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ostinato.config import EngineConfig
from ostinato.engine import front
from ostinato.engine.launch import locate_model
from ostinato.engine.layout import check_layout
from ostinato.errors import ConfigError, ModelError
from ostinato.models.config import read_config
from ostinato.parallel.topology import Topology

# Of the demo model: 4 heads, 2 key-value heads, 8 experts in each of 4 layers.
REFUSED: list[tuple[dict[str, Any], str]] = [
    (
        {"tp_size": 100},
        r"4 heads cannot be shared out over attn_tp 100: .* choose a layout whose attn_tp divides 4",
    ),
    ({"tp_size": 3}, "4 heads cannot be shared out over attn_tp 3"),
    ({"dp_size": 100}, r"8 experts cannot be shared out over ep 100: .* choose a layout whose ep divides 8"),
    (
        {"tp_size": 2, "dispatch": "sharded", "max_running_requests": 5},
        "max_running_requests 5 / 2 = 2.5; use 6",
    ),
    ({"dp_size": 2, "redundant_experts": 1}, "9 expert slots cannot be shared out over ep 2"),
    ({"dp_size": 2, "redundant_experts": 1_000_000}, "redundant_experts 1000000 is over 16, .* lower it"),
    ({"redundant_experts": 1_000_000}, "redundant_experts 1000000 is over 8, .* lower it"),
    ({"dp_size": 2, "expert_placement": "/nowhere/at/all.json"}, "/nowhere/at/all.json cannot be read"),
]


def _refuses(monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], message: str) -> None:
    def started(*args: Any) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr(front, "RankProcesses", started)
    with pytest.raises((ConfigError, ModelError), match=message):
        front.open_engine(EngineConfig(progress=False, threads=1, **options), lambda *args: None)


@pytest.mark.parametrize(("options", "message"), REFUSED, ids=str)
def test_no_process_is_started(
    options: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _refuses(monkeypatch, options, message)


def test_a_model_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    _refuses(
        monkeypatch, {"dp_size": 2, "model": "/nowhere/at/all"}, "/nowhere/at/all is neither a directory nor"
    )


def test_a_placement_of_too_many_slots(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "placement.json"
    path.write_text(json.dumps({"slots": [list(range(8)) * 1000] * 4}))
    options = {"dp_size": 2, "expert_placement": str(path)}
    _refuses(monkeypatch, options, "layer 0 has 8000 slots, over 24 for 8 experts on ep 2")


@pytest.mark.parametrize(
    "layout", [Topology(2, 1, 2), Topology(4, 2, 1), Topology(4, 1, 4), Topology(8, 8, 8)], ids=str
)
def test_what_can_be_is_not_refused(layout: Topology) -> None:
    most = 8 * layout.ep
    for redundant in (0, layout.ep, most):
        config = EngineConfig(redundant_experts=redundant, dispatch="all_to_all")
        check_layout(config, read_config(locate_model(None)), layout)
