"""The comparison with transformers: it passes, names the layer of a sum taken twice, and says why it cannot be made."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from ostinato.engine.engine import Engine
from ostinato.errors import ConfigError
from ostinato.models.rope import RopeConfig
from ostinato.parallel.shm import shm_supported
from ostinato.parallel.topology import Topology
from ostinato.verify.faults import Injection, fault_named
from ostinato.verify.findings import CheckResult
from ostinato.verify.program import program
from ostinato.verify.reference import PROMPTS, ask_transformers, given_prompts
from ostinato.verify.run import Plan, Run

TEXTS = ("w3 w14 w15 w92 w65 w35 w89 w79", "w27 w18 w28 w18 w28")


def compared(engine: Engine, **options: Any) -> CheckResult:
    verification = Run(engine, Plan(only=("reference",), prompts=TEXTS, **options))
    verification.cells(lambda title, failed, share: None)
    verification.compare()
    (result,) = verification.results()
    return result


def test_it_agrees_and_a_sum_taken_twice_is_named(opened: Callable[..., Engine]) -> None:
    engine = opened("qwen2_moe")
    result = compared(engine)
    assert [(cell.mode, cell.n) for cell in result.cells] == [("prompt", 8), ("prompt", 5)]
    assert result.passed
    assert result.comparisons == 2 * (8 + 5)
    assert "up to 0.002 passes" in result.notes[0]
    broken = compared(engine, inject=Injection(fault_named("summed-twice"), 0, 1))
    assert not broken.passed
    assert {finding.place.layer for finding in broken.findings} == {1}
    assert all(
        finding.place.rank == 0 and "--only reference" in finding.reproduce for finding in broken.findings
    )


@pytest.mark.skipif(not shm_supported(), reason="needs memfd and x86")
def test_ranks_that_share_the_columns_of_the_embedding_agree(
    tiny: Callable[[str], str], ensembles: ModuleType, small: dict[str, Any]
) -> None:
    options = {name: value for name, value in small.items() if name not in ("threads", "progress")}
    with ensembles.ensemble(Topology(2, 1, 2), program(), model=tiny("qwen3_moe"), **options) as ranks:
        result = compared(ranks.front)
    assert result.passed
    assert result.comparisons == 2 * 2 * (8 + 5)


def test_what_cannot_be_compared_is_skipped_with_a_reason(
    opened: Callable[..., Engine], tmp_path: Path
) -> None:
    engine = opened("llama")
    assert compared(engine, reference=False).skipped == "it was switched off"
    engine.config = engine.config.replace(quantization="int8", kernels="numba")
    assert ask_transformers(engine, TEXTS, 64) == "int8 weights are not those that transformers would run"
    engine.config = engine.config.replace(quantization=None)
    longrope = RopeConfig("longrope", 1e4, 64, 128, 32, {})
    layers = (replace(engine.model_config.layers[0], rope=longrope),)
    engine.model_config, plain = replace(engine.model_config, layers=layers), engine.model_config
    assert "for contexts over 32" in str(ask_transformers(engine, TEXTS, 64))
    engine.model_config = plain
    engine.directory = tmp_path
    assert "transformers cannot load it" in str(ask_transformers(engine, TEXTS, 64))


def test_prompts(tmp_path: Path) -> None:
    assert given_prompts((), None) == PROMPTS
    file = tmp_path / "prompts"
    file.write_text("one\n\ntwo\n")
    assert given_prompts(("zero",), file) == ("zero", "one", "two")
    (tmp_path / "latin1").write_bytes(b"caf\xe9")
    with pytest.raises(ConfigError, match=r"latin1 is not UTF-8 \(byte 3\)"):
        given_prompts((), tmp_path / "latin1")
    for wrong in (lambda: given_prompts(("",), None), lambda: given_prompts((), tmp_path / "none")):
        with pytest.raises(ConfigError, match="prompt"):
            wrong()
