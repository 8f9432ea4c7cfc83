"""One pool of threads: torch's OpenMP team computes, and nobody else's."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from ostinato.config import EngineConfig
from ostinato.errors import ConfigError
from ostinato.ops.cpu.threads import pin_threads

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

RUN = """
import json, os, sys, threading
from ostinato import LLM, SamplingParams
from ostinato.ops.cpu.threads import openmp_libraries

def run_times():
    # Nanoseconds that each thread of this process has run.
    times = {}
    for thread in os.listdir("/proc/self/task"):
        with open(f"/proc/self/task/{thread}/schedstat") as file:
            times[thread] = int(file.read().split()[0])
    return times

with LLM(threads=2, context_length=512) as llm:
    params = SamplingParams(max_tokens=16, ignore_eos=True, temperature=1.0)
    llm.generate("Once upon", params)
    for thread in threading.enumerate():
        if thread.name == "kv-memory":  # it computes nothing, and ends
            thread.join()
    loaded = run_times()
    llm.generate([list(range(1, 300)), list(range(5, 200))], params)
    done = run_times()
print(json.dumps({
    "started": sorted(set(done) - set(loaded)),
    "worked": sorted(t for t in done if done[t] > loaded.get(t, 0)),
    "main": str(os.getpid()),
    "libraries": openmp_libraries(),
    "numba": "numba" in sys.modules,
}))
"""

PIN = """
import os, threading, torch
from ostinato.ops.cpu.threads import pin_threads

torch.set_num_threads(len(os.sched_getaffinity(0)))
there, ended = os.listdir, threading.Thread(target=int)
ended.start()
ended.join()
os.listdir = lambda path: [*there(path), str(ended.native_id)]  # it was there a moment ago
cores = pin_threads()
assert cores == pin_threads() == tuple(sorted(cores)), cores
torch.ones(1 << 22).add(1)
bound = [os.sched_getaffinity(int(thread)) for thread in there("/proc/self/task")]
assert [{core} in bound for core in cores] == [True] * torch.get_num_threads(), bound
assert os.sched_getaffinity(0) == {cores[0]}
"""


@pytest.fixture(scope="module")
def run() -> dict[str, Any]:
    """A process with two threads that has served requests twice; what was seen around the second time."""
    environment = {**os.environ, "OMP_NUM_THREADS": "2"}
    for _ in range(2):  # the first time may compile, and so import Numba
        done = subprocess.run(
            [sys.executable, "-c", RUN], env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_as_many_threads_compute_as_were_asked_for(run: dict[str, Any]) -> None:
    assert len(run["worked"]) == 2
    assert run["main"] in run["worked"]


def test_serving_starts_no_threads(run: dict[str, Any]) -> None:
    assert not run["started"]


def test_one_openmp_runtime_and_no_threading_layer_of_numba(run: dict[str, Any]) -> None:
    assert len(run["libraries"]) == 1
    assert "torch" in run["libraries"][0]
    assert not run["numba"]


def test_pinned_threads_have_a_core_each() -> None:
    done = subprocess.run([sys.executable, "-c", PIN], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_more_threads_than_cores_are_not_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda thread: set())
    with pytest.raises(ConfigError, match="may use 0; lower threads"):
        pin_threads()
    with pytest.raises(ConfigError, match="leave it out, or run one rank"):
        EngineConfig(pin_threads=True, tp_size=2)
