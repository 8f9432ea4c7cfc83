"""`ostinato replay-trace`: a recorded step repeats its bits; which result was wrong is said; the rest is refused."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open
from safetensors.torch import save_file
from typer.testing import CliRunner

from ostinato import LLM, SamplingParams
from ostinato.cli import app
from ostinato.engine.rerun import rerun
from ostinato.engine.trace import MAX_TRACES, checkpoint_identity, read_trace
from ostinato.errors import ConfigError, TraceError
from ostinato.graphs import Tape
from ostinato.padding import GraphKey

PROMPTS = ["It is a truth universally acknowledged, that a single man", "To be"]
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


def quiet(*_: Any) -> None:
    return


def play(llm: LLM) -> None:
    llm.generate(PROMPTS, GREEDY)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Traces of a prefill step and of decode steps, of which one was tampered with."""
    directory = tmp_path_factory.mktemp("traces")
    options: dict[str, Any] = {"threads": 1, "progress": False, "dtype": "float32", "page_size": 16}
    with LLM(trace_dir=str(directory), trace_steps=5, enable_prefix_caching=False, **options) as llm:
        play(llm)
        play(llm)
    with LLM(trace_dir=str(directory / "bad"), shadow_rate=1.0, **options) as llm:
        play(llm)
        tape = llm.engine.worker.decode.graph(GraphKey("decode", 2, 0, ""))
        assert isinstance(tape, Tape)
        tape._calls, tape._whole = (*tape._calls, tape.outputs.neg_), None
        play(llm)
    return directory


def pick(directory: Path, kind: str) -> Path:
    return sorted(directory.glob(f"{kind}-*.trace"))[-1]


@pytest.mark.parametrize("kind", ["decode", "prefill"])
def test_a_step_repeats_its_bits(recorded: Path, kind: str) -> None:
    result = rerun(read_trace(pick(recorded, kind)), None, quiet)
    assert result.agrees
    assert result.header["key"] == {"decode": "decode/2", "prefill": "extend/24"}[kind]
    assert "agree" in result.verdict


def test_the_command_says_which_result_was_wrong(recorded: Path) -> None:
    found = CliRunner().invoke(app, ["replay-trace", str(recorded / "bad")])
    assert found.exit_code == 1, found.output
    said = " ".join(found.output.split())
    assert "outputs differ from row 0 on" in said
    assert "a graph captured now is right" in said
    found = CliRunner().invoke(app, ["replay-trace", str(pick(recorded, "decode")), "--json"])
    assert found.exit_code == 0, found.output
    assert json.loads(found.stdout)["compared"]["replayed / seen"] == "same bits"


def changed(path: Path, to: Path, change: Callable[[dict[str, Any], dict[str, Any]], object]) -> Path:
    """A copy of a trace after `change(header, tensors)`."""
    with safe_open(path, "pt") as file:
        header = json.loads(file.metadata()["ostinato"])
        names = file.keys()
        tensors = {name: file.get_tensor(name) for name in names}
    change(header, tensors)
    save_file(tensors, to, {"ostinato": json.dumps(header)})
    return to


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda h, t: h["parallel"].update(tp=2), "ran on 2 ranks"),
        (lambda h, t: h.update(left_out="9 MiB of KV pages"), "lacks 9 MiB"),
        (lambda h, t: h.update(format=9), "no replay trace of format 3"),
        (lambda h, t: h.pop("kernels"), "lacks kernels"),
        (lambda h, t: h["kernels"].update(ops="numba.other"), "recorded with ops 'numba.other'"),
        (lambda h, t: h["model"].update(identity="0" * 64), "another checkpoint"),
        (lambda h, t: t["page_table"].fill_(1000), "page_table hold"),
        (lambda h, t: t["batch.input_ids"].fill_(-3), "input_ids hold"),
    ],
    ids=["ranks", "large", "format", "header", "kernels", "model", "pages", "tokens"],
)
def test_what_cannot_be_run_is_refused(
    recorded: Path, tmp_path: Path, change: Callable[[Any, Any], object], said: str
) -> None:
    path = changed(pick(recorded, "decode"), tmp_path / "x.trace", change)
    with pytest.raises(TraceError, match=re.escape(said)):
        rerun(read_trace(path), None, quiet)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda h, t: t.pop("batch.logit_rows"), "lacks logit_rows"),
        (lambda h, t: t["batch.logit_rows"].fill_(999), "logit_rows hold"),
        (lambda h, t: t["batch.num_logit_rows"].fill_(999), "num_logit_rows hold"),
    ],
    ids=["none", "rows", "count"],
)
def test_wanted_rows_that_are_not_there_are_refused(
    recorded: Path, tmp_path: Path, change: Callable[[Any, Any], object], said: str
) -> None:
    path = changed(pick(recorded, "prefill"), tmp_path / "x.trace", change)
    with pytest.raises(TraceError, match=said):
        rerun(read_trace(path), None, quiet)


def test_files_that_are_no_traces(recorded: Path, tmp_path: Path) -> None:
    whole = pick(recorded, "decode").read_bytes()
    for name, data in {"empty": b"", "short": whole[: len(whole) // 2], "text": b"hello" * 99}.items():
        path = tmp_path / name
        path.write_bytes(data)
        with pytest.raises(TraceError, match="cannot be read as a replay trace"):
            read_trace(path)
    for wrong in (tmp_path / "none", tmp_path):
        assert CliRunner().invoke(app, ["replay-trace", str(wrong)]).exit_code != 0


def test_a_directory_never_gets_too_many(recorded: Path, tmp_path: Path, make_llm: Any) -> None:
    for number in range(MAX_TRACES - 1):
        shutil.copy(pick(recorded, "decode"), tmp_path / f"{number}.trace")
    llm = make_llm(trace_dir=str(tmp_path), trace_steps=3)
    play(llm)
    assert len(list(tmp_path.iterdir())) == MAX_TRACES
    assert len(llm.stats()["checks"]["traces"]) == 1
    make_llm(trace_dir=str(tmp_path), shadow_rate=0.1)
    with pytest.raises(ConfigError, match=f"holds {MAX_TRACES} traces, as many as it may"):
        make_llm(trace_dir=str(tmp_path), trace_steps=3)


def test_other_weights_are_another_checkpoint(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    """A model trained on and saved in the same place has files of the same names, sizes and headers."""
    source = checkpoint("llama")
    shutil.copytree(source, tmp_path, dirs_exist_ok=True)
    assert checkpoint_identity(tmp_path) == checkpoint_identity(source)
    (file,) = tmp_path.glob("*.safetensors")
    content = bytearray(file.read_bytes())
    begin = 8 + int.from_bytes(content[:8], "little")
    content[begin:] = bytes(value ^ 1 for value in content[begin:])
    file.write_bytes(content)
    assert checkpoint_identity(tmp_path) != checkpoint_identity(source)
