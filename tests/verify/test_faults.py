"""Every fault that can be put in is found, and its place is named: slot, layer, bucket, rank."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
from typer.testing import CliRunner

from ostinato.cli import app
from ostinato.config import EngineConfig
from ostinato.engine.engine import Engine
from ostinato.errors import CaptureError, ConfigError
from ostinato.graphs.frozen import FrozenInputs
from ostinato.parallel.shm import shm_supported
from ostinato.parallel.topology import Topology
from ostinato.verify.faults import FAULTS, Injection, fault_named
from ostinato.verify.findings import Finding
from ostinato.verify.program import program
from ostinato.verify.run import Plan, Run

DECODE, FULL, BROKEN = "decode:8:5", "prefill-full:8:5", "prefill-breakable:8:5"
LAYER = 1
ONE_RANK: dict[str, tuple[str, str, dict[str, Any]]] = {
    "raw-count": ("pads", DECODE, {"slot": "num_token_non_padded"}),
    "frozen-count": ("pads", FULL, {"slot": "num_token_non_padded"}),
    "frozen-wanted": ("wanted", FULL, {"row": 4}),
    "stale-ids": ("pads", DECODE, {"slot": "input_ids", "row": 5}),
    "stale-positions": ("pads", DECODE, {"slot": "positions", "row": 5}),
    "stale-kv-slots": ("pads", FULL, {"slot": "out_cache_loc", "row": 5}),
    "stale-page-rows": ("pads", DECODE, {"slot": "req_pool_indices", "row": 5}),
    "narrow-fill": ("pads", BROKEN, {"slot": "positions", "row": 5}),
    "pads-write": ("pads", DECODE, {"slot": "out_cache_loc", "layer": 0}),
    "frozen-plan": ("hosts", DECODE, {"slot": "seq_lens", "layer": 0}),
    "no-prefix": ("prefix", FULL, {"layer": 0}),
    "unmasked-router": ("pads", DECODE, {"slot": "moe.topk_ids", "layer": LAYER, "row": 5}),
    "load-counts-pads": ("pads", FULL, {"slot": "expert_load", "layer": LAYER}),
    "experts-take-pads": ("pads", DECODE, {"slot": "delta", "layer": LAYER}),
    "zero-length": ("pads", DECODE, {"slot": "delta", "layer": LAYER}),
    "shared-scale": ("pads", DECODE, {"slot": "workspace", "layer": LAYER}),
    "width-matters": ("buckets", DECODE, {"layer": LAYER, "row": 0}),
    "mates-matter": ("mates", DECODE, {"layer": LAYER}),
    "host-value": ("hosts", DECODE, {"slot": "seq_lens", "layer": LAYER}),
    "frozen-input": ("graphs", DECODE, {"layer": LAYER}),
    "weak-reference": ("graphs", BROKEN, {"layer": LAYER}),
}
SEVERAL_RANKS = {"idle-counted", "idle-unplanned", "stale-parcel", "early-return"}
BY_REFERENCE = {"summed-twice"}


@pytest.fixture(scope="module")
def engine(tiny: Callable[[str], str], small: dict[str, Any]) -> Engine:
    """An engine that every fault is put into, and taken out of again."""
    return Engine(EngineConfig(model=tiny("olmoe"), **small), lambda *args: None, program=program())


def found(engine: Engine, check: str, cell: str, injection: Injection | None) -> list[Finding]:
    verification = Run(engine, Plan(only=(check,), cell=cell, inject=injection))
    verification.cells(lambda title, failed, share: None)
    assert not verification.broken
    (result,) = verification.results()
    assert result.cells
    return list(result.findings)


def test_the_table_has_every_fault() -> None:
    assert {fault.name for fault in FAULTS} == set(ONE_RANK) | SEVERAL_RANKS | BY_REFERENCE


@pytest.mark.parametrize("name", ONE_RANK)
def test_a_fault_is_found_and_its_place_named(name: str, engine: Engine) -> None:
    check, cell, where = ONE_RANK[name]
    findings = found(engine, check, cell, Injection(fault_named(name), 0, LAYER))
    places = [(finding.place, finding.what) for finding in findings]
    assert any(all(getattr(place, key) == value for key, value in where.items()) for place, _ in places), (
        places
    )
    mode, bucket, n = cell.split(":")
    assert {(p.check, p.mode, p.bucket, p.n, p.rank) for p, _ in places} == {
        (check, mode, int(bucket), int(n), 0)
    }
    assert all(f"--only {check} --cell {cell}" in finding.reproduce for finding in findings)


def test_nothing_is_left_of_a_fault(engine: Engine) -> None:
    assert found(engine, "pads", DECODE, Injection(fault_named("pads-write"), 0, 0))
    assert found(engine, "graphs", BROKEN, Injection(fault_named("weak-reference"), 0, 0))
    for check, cell in (
        ("pads", DECODE),
        ("pads", FULL),
        ("wanted", FULL),
        ("graphs", BROKEN),
        ("hosts", DECODE),
    ):
        assert found(engine, check, cell, None) == []


def led_by(group: int) -> str:
    """A decode cell whose rows the group has: the other one is idle, or has any number."""
    cells = [f"decode:8:{n}" for n in range(2, 8)]
    return next(cell for cell in cells if zlib.crc32(f"0 {cell}".encode()) % 2 == group)


@pytest.mark.skipif(not shm_supported(), reason="needs memfd and x86")
def test_faults_of_one_rank_among_several(
    tiny: Callable[[str], str], ensembles: ModuleType, small: dict[str, Any]
) -> None:
    """An idle rank's faults, and one layer's router on a rank that has rows: the rank is named, and no other."""
    options = {name: value for name, value in small.items() if name not in ("threads", "progress")}
    with ensembles.ensemble(Topology(2, 2, 2), program(), model=tiny("olmoe"), **options) as ranks:
        for name, where in (
            ("idle-counted", {"slot": "num_token_non_padded"}),
            ("idle-unplanned", {"slot": "attention"}),
            ("unmasked-router", {"slot": "moe.topk_ids", "layer": LAYER}),
        ):
            leads = 0 if name.startswith("idle") else 1
            findings = found(ranks.front, "pads", led_by(leads), Injection(fault_named(name), 1, LAYER))
            places = [finding.place for finding in findings]
            assert any(all(getattr(p, key) == value for key, value in where.items()) for p in places), places
            assert {place.rank for place in places} == {1}
        assert found(ranks.front, "pads", led_by(0), None) == []


@pytest.mark.skipif(not shm_supported(), reason="needs memfd and x86")
@pytest.mark.parametrize("dispatch", ["gathered", "all_to_all"])
def test_what_ranks_send_is_poisoned(
    tiny: Callable[[str], str], ensembles: ModuleType, small: dict[str, Any], dispatch: str
) -> None:
    """The buffers of a dispatch lie outside of the workspace: a row too many of them is found, on its rank."""
    options = {name: value for name, value in small.items() if name not in ("threads", "progress")}
    options |= {"model": tiny("olmoe"), "dispatch": dispatch}
    with ensembles.ensemble(Topology(2, 2, 2), program(), **options) as ranks:
        injection = Injection(fault_named("stale-parcel"), 1, LAYER)
        places = [finding.place for finding in found(ranks.front, "pads", led_by(1), injection)]
        assert any((place.rank, place.layer) == (1, LAYER) for place in places), places
        assert found(ranks.front, "pads", led_by(1), None) == []


def test_the_command_fails_and_names_the_place(tiny: Callable[[str], str]) -> None:
    words = ["verify", "--model", tiny("olmoe"), "--threads", "1", "--kernels", "reference"]
    words += ["--context-length", "64", "--max-running-requests", "8", "--prefill-buckets", "8"]
    found = CliRunner().invoke(
        app, [*words, "--inject", "unmasked-router:0:1", "--only", "pads", "--cell", "decode:8:5"]
    )
    assert found.exit_code == 1, found.output
    output = " ".join(found.output.split())
    assert "FAILED" in output
    assert "decode bucket 8, n 5, rank 0, layer 1, slot moe.topk_ids, row 5" in output


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("unmasked", "there is no fault 'unmasked'; choose among raw-count"),
        ("raw-count:x", "give name:rank:layer"),
        ("raw-count:1", "1 ranks and 3 layers"),
        ("raw-count:0:3", "1 ranks and 3 layers"),
        ("idle-counted", "needs data-parallel groups"),
    ],
)
def test_faults_that_cannot_be(text: str, says: str, engine: Engine) -> None:
    with pytest.raises(ConfigError, match=says):
        Run(engine, Plan(inject=Injection.parse(text)))


def test_a_graph_that_refuses_to_replay_is_a_finding(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the product refuses to do is told as a finding of its cell; the run goes on."""

    def refuses(self: Any, view: object, verdict: object) -> None:
        raise CaptureError("field 'x' was 1 when the graph was captured and is 2 now")

    monkeypatch.setattr(FrozenInputs, "check", refuses)
    (finding,) = found(engine, "graphs", DECODE, None)
    assert "the step raised CaptureError: field 'x' was 1" in finding.what
    monkeypatch.undo()
    assert found(engine, "graphs", DECODE, None) == []
