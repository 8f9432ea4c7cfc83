"""The perplexity bench without its texts: windows, the accounting of a score, and one run on a text of ours."""

from __future__ import annotations

import importlib
import json
import math
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from ostinato.engine.launch import locate_model
from ostinato.text.tokenizer import Tokenizer

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    """bench/perplexity.py, imported as its script runs."""
    before = list(sys.path)
    sys.path.insert(0, str(ROOT / "bench"))
    try:
        return importlib.import_module("perplexity")
    finally:
        sys.path[:] = before


def test_windows_cover_a_text_from_end_to_end(bench: ModuleType) -> None:
    tokenizer = Tokenizer.from_dir(locate_model(None))
    text = "".join(f"{number} " for number in range(200))
    ids = tokenizer.encode(text, add_special_tokens=False)
    (front,) = tokenizer.encode("")
    found = bench.windows({"a": text, "b": text}, tokenizer, 256, 32)
    assert [len(window) for window in found] == [32] * 8
    assert {window[0] for window in found} == {front}
    assert found[:4] == found[4:]
    assert found[0][1:] == ids[:31]
    assert len(set(map(tuple, found))) == 4
    last = next(i for i in range(len(ids)) if ids[i : i + 31] == found[3][1:])
    assert len(ids) - 31 - last < 3
    with pytest.raises(SystemExit, match="lower --length"):
        bench.windows({"a": "short"}, tokenizer, 256, 32)


def test_a_score_is_of_paired_tokens(bench: ModuleType) -> None:
    first = torch.tensor([-1.0, -2.0, -3.0], dtype=torch.float64)
    ours = first - torch.tensor([0.01, 0.03, 0.02], dtype=torch.float64)
    found = bench.score("int8", "ops", ours, first)
    assert found.perplexity == pytest.approx(math.exp(2.02))
    assert found.change == pytest.approx(math.exp(0.02) - 1)
    assert found.error == pytest.approx(0.01 / 3**0.5)
    assert found.largest == pytest.approx(0.03)


def test_one_run(
    bench: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "text.txt"
    path.write_text("And it came to pass in those days, that the king spake unto the people. " * 8)
    arguments = [
        "--models",
        "demo",
        "--text",
        str(path),
        "--tokens",
        "64",
        "--length",
        "32",
        "--threads",
        "1",
    ]
    monkeypatch.setattr(sys, "argv", ["perplexity.py", *arguments])
    bench.main()
    lines = capsys.readouterr().out.splitlines()
    first, second = json.loads(lines[-1])["results"]["demo"]
    assert (first["setting"], first["change"], first["largest"]) == ("bfloat16", 0.0, 0.0)
    assert second["setting"] == "int8"
    assert second["ops"].endswith(".int8")
    assert second["largest"] > 0
    assert abs(second["perplexity"] / first["perplexity"] - 1 - second["change"]) < 1e-9
