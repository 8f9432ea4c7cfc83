"""Whole engines pass, on one rank and on four; a run keeps to its budget and says what it did not run."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from typer.core import TyperGroup
from typer.main import get_command
from typer.testing import CliRunner

from ostinato.cli import app
from ostinato.cli.verify import again
from ostinato.engine.engine import Engine
from ostinato.errors import ConfigError
from ostinato.parallel.shm import shm_supported
from ostinato.parallel.topology import Topology
from ostinato.verify.checks import CHECKS
from ostinato.verify.findings import CheckResult, from_json
from ostinato.verify.program import program
from ostinato.verify.run import Plan, Run


def run(engine: Engine, **options: Any) -> dict[str, CheckResult]:
    """Every check's result by name."""
    verification = Run(engine, Plan(**options))
    verification.cells(lambda title, failed, share: None)
    assert not verification.broken
    return {result.name: result for result in verification.results()}


def failures(results: dict[str, CheckResult]) -> list[str]:
    return [f"{f.place}: {f.what}" for result in results.values() for f in result.findings]


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("qwen2_moe", {"kernels": "numba", "dtype": "bfloat16"}),
        ("llama4", {}),
        ("llama", {"graph": "eager"}),
        ("qwen3_moe", {"quantization": "int8", "kernels": "numba", "dtype": "bfloat16"}),
    ],
    ids=["qwen2_moe", "llama4", "eager", "int8"],
)
def test_one_rank_passes(family: str, options: dict[str, Any], opened: Callable[..., Engine]) -> None:
    results = run(opened(family, **options), budget=0.3)
    assert failures(results) == []
    assert [name for name, result in results.items() if result.skipped] == (
        ["graphs", "hosts", "idle"] if options.get("graph") == "eager" else ["idle"]
    )
    ran = [result for result in results.values() if not result.skipped]
    assert all(result.cells and result.comparisons for result in ran)


@pytest.mark.skipif(not shm_supported(), reason="needs memfd and x86")
@pytest.mark.parametrize("dispatch", ["gathered", "all_to_all"])
def test_four_ranks_pass(
    request: pytest.FixtureRequest,
    dispatch: str,
    tiny: Callable[[str], str],
    ensembles: ModuleType,
    small: dict[str, Any],
) -> None:
    if dispatch != "gathered" and not request.config.getoption("--exhaustive"):
        pytest.skip("one dispatch is enough without --exhaustive")
    options = {name: value for name, value in small.items() if name not in ("threads", "progress")}
    model = tiny("qwen2_moe")
    layout = Topology(4, 2, 4)
    with ensembles.ensemble(layout, program(), model=model, dispatch=dispatch, **options) as ranks:
        every = request.config.getoption("--exhaustive")
        results = run(ranks.front, budget=0.0, only=() if every else ("pads", "idle"))
    assert failures(results) == []
    assert not [name for name, result in results.items() if result.skipped]
    assert all(result.cells for result in results.values())


def test_one_cell(opened: Callable[..., Engine]) -> None:
    """The cell asked for, in the checks that take it; the others say why they did not run."""
    engine = opened("llama")
    results = run(engine, cell="decode:4:3", only=("pads", "prefix"))
    assert list(results) == ["pads", "prefix"]
    assert [(c.mode, c.bucket, c.n) for c in results["pads"].cells] == [("decode", 4, 3)]
    assert "nothing to say" in results["prefix"].skipped
    with pytest.raises(ConfigError, match="wider than the largest bucket, 8"):
        Run(engine, Plan(cell="decode:16:3"))


def test_without_time_every_check_runs_one_cell_of_each_mode(opened: Callable[..., Engine]) -> None:
    results = run(opened("qwen3_moe"), budget=0.0)
    assert {name: len(result.cells) for name, result in results.items()} == {
        **{check.name: 3 for check in CHECKS},
        "prefix": 2,
        "wanted": 2,
        "idle": 0,
    }
    assert results["pads"].cells_possible == 71
    assert results["pads"].notes[0].startswith("not all cells: n = 1")


def test_the_command(tmp_path: Path, tiny: Callable[[str], str], small: dict[str, Any]) -> None:
    words = ["verify", "--model", tiny("llama"), "--budget", "0", "--threads", "1", "--kernels", "reference"]
    words += ["--context-length", "64", "--max-running-requests", "4", "--prefill-buckets", "4,8"]
    json, html = tmp_path / "report.json", tmp_path / "report.html"
    found = CliRunner().invoke(app, [*words, "--json", str(json), "--html", str(html)])
    assert found.exit_code == 0, found.output
    assert "PASSED" in found.output
    report = from_json(json.read_bytes())
    assert report.passed
    assert report.model_facts["family"] == "llama"
    assert report.deployment["prefill buckets"] == "4, 8"
    assert "<html" in html.read_text()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--only", "pad"], "there is no check 'pad'; choose among pads,"),
        (["--json", "/nowhere/report.json"], "there is no directory /nowhere"),
        (["--cell", "decode:8"], "give mode:bucket:n"),
    ],
)
def test_input_that_cannot_be_verified(words: list[str], says: str, tiny: Callable[[str], str]) -> None:
    shape = ["--kernels", "reference", "--threads", "1", "--context-length", "64"]
    found = CliRunner().invoke(app, ["verify", "--model", tiny("llama"), *shape, *words])
    assert found.exit_code == 2, found.output
    assert says in " ".join(found.output.split())


def test_the_command_that_runs_it_again_is_one(tmp_path: Path) -> None:
    """Every word of it is an option with a value that the command line takes, own prompts among them."""
    engine = {"tp_size": 2, "cp_size": 1, "enable_prefix_caching": False, "decode_buckets": (1, 4)}
    asked = ["--prompt", "it's", "--prompts", str(tmp_path / "own prompts")]
    words = shlex.split(again("model", engine, 7, "raw-count:1", asked)("reference", "prompt/0"))
    assert words[:2] == ["ostinato", "verify"]
    group = get_command(app)
    assert isinstance(group, TyperGroup)
    options = {name for option in group.commands["verify"].params for name in option.opts}
    assert {word for word in words if word.startswith("--")} <= options
    assert [words[words.index(name) + 1] for name in ("--prompt", "--prompts", "--cp")] == [
        asked[1],
        asked[3],
        "1",
    ]
