"""Starting: what a second start must not do, because the first has done it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from ostinato import LLM, SamplingParams
from ostinato.ops.cpu import background
from ostinato.ops.cpu import compile as compile_module
from ostinato.ops.cpu.background import BackgroundBuild, Turn
from ostinato.ops.cpu.compile import Compiler, cache_key, discard_unused, kernel_name
from ostinato.ops.cpu.isa import select_isa
from ostinato.ops.cpu.kernel_list import KernelJob, kernel_jobs
from ostinato.ops.cpu.launch import chain_entry

SLOW_TO_IMPORT = (
    "numba",
    "transformers",
    "jinja2",
    "rich.progress",
    "safetensors",
    "huggingface_hub",
    "gguf",
)

START = """
import json, sys
from ostinato import LLM, SamplingParams
with LLM() as llm:
    text = llm.generate("Once upon", SamplingParams(max_tokens=8))[0].outputs[0].text
    compiler = llm.engine.worker.model.ops.runtime.compiler
    print(json.dumps({
        "text": text,
        "imported": sorted(sys.modules),
        "names": sorted(compiler.names),
        "kernels": compiler.num_compiled,
        "from_disk": compiler.num_cache_hits,
    }))
"""


def start() -> dict[str, Any]:
    """A process that loads the demo and generates."""
    done = subprocess.run([sys.executable, "-c", START], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.fixture(scope="module")
def second_start() -> tuple[dict[str, Any], dict[str, Any]]:
    return start(), start()


def test_a_second_start_compiles_nothing(second_start: tuple[dict[str, Any], dict[str, Any]]) -> None:
    first, second = second_start
    assert second["kernels"] > 0
    assert second["from_disk"] == second["kernels"]
    assert second["text"] == first["text"]


def test_a_second_start_imports_nothing_slow(second_start: tuple[dict[str, Any], dict[str, Any]]) -> None:
    assert not set(SLOW_TO_IMPORT) & set(second_start[1]["imported"])


def listed(quantization: str | None) -> set[str]:
    isa = select_isa()
    quantized = quantization is not None
    jobs = kernel_jobs(isa, torch.bfloat16, mixture=True, quantized=quantized, coded=isa.byte_tables)
    return {job.name for job in jobs}


def test_the_kernels_of_the_demo_are_compiled_ahead(
    second_start: tuple[dict[str, Any], dict[str, Any]],
) -> None:
    assert set(second_start[1]["names"]) <= listed(None)


def test_the_kernels_of_an_int8_model_are_compiled_ahead() -> None:
    with LLM(quantization="int8", context_length=256) as llm:
        llm.generate("Once upon", SamplingParams(max_tokens=3, temperature=1.0, top_p=0.9, seed=1))
        assert llm.engine.worker.model.ops.runtime.compiler.names <= listed("int8")  # type: ignore[attr-defined]


SMALL = [KernelJob("launch.chain_entry", 1), KernelJob("packing.pack_entry", 1), KernelJob("routing.fp32")]


def test_workers_make_what_is_missing(tmp_path: Path) -> None:
    compiler = Compiler(tmp_path)
    seen: list[tuple[int, int]] = []
    build = BackgroundBuild(SMALL, compiler, 4, lambda done, total: seen.append((done, total)))
    compiler.pending = build
    assert compiler.address(chain_entry)  # waits for its worker
    build.finish()
    assert seen == [(0, 3), (1, 3), (2, 3), (3, 3)]
    assert all(compiler.has(job.name) for job in SMALL)
    assert (compiler.num_compiled, compiler.num_cache_hits) == (1, 0)  # it was not there at first
    again = Compiler(tmp_path)
    for job in SMALL:
        job.run(again)
    assert (again.num_compiled, again.num_cache_hits) == (3, 3)
    nothing = BackgroundBuild(SMALL, again, 4, lambda done, total: pytest.fail("there was nothing to do"))
    nothing.finish()


def test_of_two_starts_one_compiles(tmp_path: Path) -> None:
    """The other takes its files; both are told of all kernels."""
    first, second = Compiler(tmp_path), Compiler(tmp_path)
    turn = Turn(first.directory)
    assert turn.take()
    seen: list[tuple[int, int]] = []
    follower = BackgroundBuild(SMALL, second, 4, lambda done, total: seen.append((done, total)))
    second.pending = follower
    made = {}
    for i, job in enumerate(SMALL):
        assert len(seen) == i, "compiled although it is another one's turn"
        job.run(first)
        made[job.name] = (first.directory / f"{job.name}.o").stat().st_mtime_ns
        follower.wait(job.name)
    follower.finish()
    assert seen == [(1, 3), (2, 3), (3, 3)]
    assert second.address(chain_entry)
    assert {job.name: (first.directory / f"{job.name}.o").stat().st_mtime_ns for job in SMALL} == made
    assert not Turn(first.directory).take(), "the turn was taken from who has it"


def test_who_waits_for_a_start_that_ends_begins_where_it_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = Compiler(tmp_path), Compiler(tmp_path)
    turn = Turn(first.directory)
    assert turn.take()
    follower = BackgroundBuild(SMALL, second, 4, lambda *_: None)
    SMALL[0].run(first)
    turn.give_back()
    follower.finish()
    for job in SMALL:
        follower.wait(job.name)
        job.run(second)
    assert Turn(first.directory).take(), "the turn was not given back"
    monkeypatch.setattr(background, "PATIENCE_S", 0.0)
    third = Compiler(tmp_path / "other")
    stuck = Turn(third.directory)
    assert stuck.take()
    impatient = BackgroundBuild(SMALL, third, 4, lambda *_: None)
    impatient.finish()
    assert all(third.has(job.name) for job in SMALL), "waited for a start that does nothing"


def test_whoever_waits_for_a_broken_worker_compiles_by_itself(tmp_path: Path) -> None:
    compiler = Compiler(tmp_path)
    broken = [KernelJob("launch.no_such_kernel", 1)] * 3
    build = BackgroundBuild([*broken, KernelJob(kernel_name(chain_entry), 1)], compiler, 1, lambda *_: None)
    compiler.pending = build
    assert compiler.address(chain_entry)
    build.finish()
    assert compiler.has(kernel_name(chain_entry))


def test_directories_that_no_start_has_used_are_removed(tmp_path: Path) -> None:
    old, recent, other = (tmp_path / name for name in ("0.0.9-" + "a" * 16, "0.0.9-" + "b" * 16, "precious"))
    mine = tmp_path / cache_key()
    for directory in (old, recent, other, mine):
        (directory / "below").mkdir(parents=True)
        (directory / "below" / "x.o").write_bytes(b"x")
    day = 86400
    now = time.time()
    for directory, age in ((old, 31), (recent, 29), (other, 400), (mine, 400)):
        os.utime(directory, (now - age * day, now - age * day))
    assert discard_unused(tmp_path) == [old.name]
    assert {path.name for path in tmp_path.iterdir()} == {recent.name, other.name, mine.name}
    assert now - mine.stat().st_mtime < day  # marked as used
    assert discard_unused(tmp_path) == []


def test_a_directory_removed_under_a_compiler_is_made_again(tmp_path: Path) -> None:
    compiler = Compiler(tmp_path)
    discard_unused(tmp_path)
    shutil.rmtree(tmp_path / cache_key())
    assert compiler.address(chain_entry)
    assert compiler.has(kernel_name(chain_entry))


def test_a_cache_that_cannot_be_written_is_done_without(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    root = tmp_path / "file" / "kernels"
    assert discard_unused(root) == []
    compiler = Compiler(root)
    assert compiler.address(chain_entry)
    assert not compiler.has(kernel_name(chain_entry))


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_a_damaged_kernel_is_compiled_again(tmp_path: Path, share: float) -> None:
    """A disk may lose the end of a file when the power fails."""
    first = Compiler(tmp_path)
    first.address(chain_entry)
    name = kernel_name(chain_entry)
    path = first.directory / f"{name}.o"
    whole = path.read_bytes()
    path.write_bytes(whole[: int(share * len(whole))] if share < 1 else whole[:-20] + bytes(20))
    second = Compiler(tmp_path)
    assert not second.has(name)
    assert second.address(chain_entry)
    assert (second.num_compiled, second.num_cache_hits) == (1, 0)
    assert second.has(name), "and is kept whole"


@pytest.mark.parametrize("source", ["ops/exact.py", "ops/choice.py", "ops/pairs.py", "ops/cpu/gemm.py"])
def test_whatever_kernels_are_made_of_is_in_the_key(tmp_path: Path, source: str) -> None:
    """Constants of their twins in torch are compiled into them."""
    shutil.copytree(Path(compile_module.__file__).parents[2], tmp_path / "ostinato")
    ask = "import ostinato.ops.cpu.compile as c; print(c.__file__, c.cache_key())"

    def key() -> str:
        done = subprocess.run(
            [sys.executable, "-c", ask], cwd=tmp_path, capture_output=True, text=True, check=True
        )
        file, found = done.stdout.split()
        assert file.startswith(str(tmp_path))
        return found

    before = key()
    with (tmp_path / "ostinato" / source).open("a") as file:
        file.write("MORE = 1\n")
    assert key() != before
