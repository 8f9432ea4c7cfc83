"""`examples/graphs_alone.py` runs, and its pads never show: bit for bit at one bucket."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from ostinato.graphs.audit import POISONS, poison_registry
from ostinato.padding import Buckets, ShapeRules, StepMode, decide_shape

PATH = Path(__file__).parents[2] / "examples" / "graphs_alone.py"


@pytest.fixture
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("graphs_alone_example", PATH)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_it_runs(example: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    example.main()
    out = capsys.readouterr().out
    assert "5 rows in a bucket of 8" in out
    assert "'captures': 3, 'replays': 5" in out


def test_it_needs_no_engine() -> None:
    imported = {
        line.split()[1].split(".")[1]
        for line in PATH.read_text().splitlines()
        if line.startswith("from ostinato")
    }
    assert imported == {"graphs", "padding"}


def test_real_rows_do_not_depend_on_pads(example: ModuleType) -> None:
    runner = example.build_runner()
    rules = ShapeRules(Buckets((8,)), Buckets(()))
    shape = decide_shape(StepMode.DECODE, [3], 3, rules)
    batch = example.Batch(3, torch.ones(3, 16), torch.tensor([0, 1, 2]))
    want = runner.run(shape, batch)[:3].clone()
    full = example.Batch(8, torch.full((8, 16), 1e9), torch.full((8,), 2))
    for poison in POISONS:
        runner.run(decide_shape(StepMode.DECODE, [8], 8, rules), full)
        poison_registry(runner.registry, poison)
        assert torch.equal(runner.run(shape, batch)[:3], want)
