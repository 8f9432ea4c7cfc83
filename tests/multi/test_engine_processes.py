"""A parallel engine over real processes: the same answers, and no end of any rank that leaves something behind."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from ostinato import LLM, SamplingParams
from ostinato.config import EngineConfig
from ostinato.engine.front import FrontEngine, open_engine
from ostinato.engine.program import RankProgram
from ostinato.errors import ParallelError

PATIENCE_S = 60
PROMPTS = ["Once upon a time", "The bear", "A"]
GREEDY = SamplingParams(max_tokens=6, temperature=0, logprobs=3)
FORMED = SamplingParams(max_tokens=12, temperature=0, structured_outputs={"choice": ["a bear", "two bears"]})
pytestmark = pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="reads /proc")


def _children(pid: int) -> list[int]:
    """Pids of the ranks that a process has started, in order."""
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            if b"ostinato.engine.rank" in Path(f"/proc/{child}/cmdline").read_bytes():
                found.append(int(child))
    return sorted(found)


def _gone(pid: int) -> bool:
    """Ended, be it that nobody has asked for its status yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def _wait_for_end(pids: list[int]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not all(map(_gone, pids)):
        assert time.monotonic() < deadline, f"{[p for p in pids if not _gone(p)]} outlived rank 0"
        time.sleep(0.02)


def test_answers_of_one_process() -> None:
    with LLM(progress=False, threads=1) as llm:
        expected = [o.outputs for o in llm.generate(PROMPTS, GREEDY)]
        formed = [o.outputs for o in llm.generate(PROMPTS, FORMED)]
    before = set(Path("/dev/shm").iterdir())
    with LLM(progress=False, threads=1, dp_size=2) as llm:
        pids = _children(os.getpid())
        assert len(pids) == 1
        outputs = llm.generate(PROMPTS, GREEDY)
        assert [o.outputs for o in outputs] == expected
        assert [o.prompt for o in outputs] == PROMPTS
        assert [o.outputs for o in llm.generate(PROMPTS, FORMED)] == formed
        streamed = list(llm.generate_stream(PROMPTS[0], GREEDY))
        assert "".join(o.outputs[0].delta for o in streamed) == expected[0][0].text
        assert llm.stats()["parallel"]["tp"] == 2
    assert all(map(_gone, pids))
    assert set(Path("/dev/shm").iterdir()) <= before


def test_an_error_of_all_ranks_is_told_once() -> None:
    command = [sys.executable, "-m", "ostinato", "generate", "x", "--dp", "2", "--threads", "1"]
    command += ["--context-length", "5000000"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
    assert ended.returncode != 0
    assert ended.stderr.count("5000000") == 1, ended.stderr
    assert "all 2 ranks" in ended.stderr


def test_abort_frees_the_other_ranks_pages() -> None:
    with LLM(progress=False, threads=1, dp_size=2) as llm:
        engine = llm.engine
        assert isinstance(engine, FrontEngine)
        endless = SamplingParams(max_tokens=100, ignore_eos=True)
        names = [engine.submit(prompt, endless) for prompt in PROMPTS]
        for _ in range(3):
            engine.step()
        assert min(llm.stats()["parallel"]["kv_tokens"]) > 0, "both groups have requests"
        late = engine.submit("Never begun", endless)
        for name in [*names, late]:
            last = engine.abort(name)
            assert last is not None
            assert last.finished
            assert last.outputs[0].finish_reason == "abort"
        assert not engine.has_work
        stats = llm.stats()
        assert [group["kv_pages_used"] for group in stats["parallel"]["groups"]] == [0, 0]
        assert stats["parallel"]["kv_tokens"] == [0, 0]


@contextmanager
def _generating(*options: str) -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    """`ostinato generate` over several ranks, amid its answer; and the pids of ranks 1, 2, ..."""
    command = [sys.executable, "-m", "ostinato", "generate", "Once upon a time", "--threads", "1", *options]
    command += ["--ignore-eos", "--max-tokens", "400", "--n", "128", "--json"]  # work for many seconds
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        deadline = time.monotonic() + PATIENCE_S
        pids: list[int] = []
        while not pids or len(pids) < int(options[options.index("--dp") + 1]) - 1:
            assert time.monotonic() < deadline, "no ranks were started"
            assert process.poll() is None, process.communicate()[1]
            pids = _children(process.pid)
            time.sleep(0.01)
        # All ranks share memory as soon as they have met; a little later they step.
        while "memfd:ostinato" not in Path(f"/proc/{process.pid}/maps").read_text():
            assert time.monotonic() < deadline, "the ranks did not meet"
            time.sleep(0.01)
        time.sleep(1.0)
        yield process, pids
    finally:
        process.kill()
        process.communicate()


def test_a_killed_rank_ends_all_others() -> None:
    with _generating("--dp", "4") as (process, pids):
        os.kill(pids[0], signal.SIGKILL)
        out, err = process.communicate(timeout=PATIENCE_S)
        assert process.returncode != 0
        assert out == ""
        assert "rank 1 was killed by SIGKILL" in err
        assert "Traceback" not in err
        _wait_for_end(pids)


def test_ranks_end_with_rank_0() -> None:
    with _generating("--dp", "2") as (process, pids):
        process.kill()
        _wait_for_end([process.pid, *pids])


@pytest.mark.parametrize("transport", ["shm", "gloo"])
def test_a_rank_stopped_amid_steps_is_named(transport: str) -> None:
    """Hanging, not dead: only a watchdog can tell."""
    llm = LLM(progress=False, threads=1, dp_size=2, rank_timeout=2, transport=transport)
    pids = _children(os.getpid())
    engine = llm.engine
    engine.submit(PROMPTS[1], SamplingParams(max_tokens=100, ignore_eos=True))
    engine.step()
    os.kill(pids[0], signal.SIGSTOP)
    with pytest.raises(ParallelError, match="rank 1 "):
        _step_until_error(engine)
    with pytest.raises(ParallelError, match="has ended"):
        engine.submit("again", GREEDY)
    llm.close()
    assert all(map(_gone, pids))


@pytest.mark.parametrize("transport", ["shm", "gloo"])
def test_a_rank_stopped_while_idle_is_named(transport: str) -> None:
    """Nobody waits for it, and nobody asks: it is ended all the same, and the next call tells."""
    llm = LLM(progress=False, threads=1, dp_size=2, rank_timeout=2, transport=transport)
    pids = _children(os.getpid())
    os.kill(pids[0], signal.SIGSTOP)
    _wait_for_end(pids)
    with pytest.raises(ParallelError, match="rank 1 gave no sign of life within 2 s"):
        llm.engine.submit("again", GREEDY)
    llm.close()


def test_a_stopped_rank_0_is_named_by_the_others() -> None:
    """They wait for its next round, which may come at any time; and it holds the store by which they met."""
    with _generating("--dp", "4", "--rank-timeout", "3") as (process, pids):
        process.send_signal(signal.SIGSTOP)
        _wait_for_end(pids)
        process.send_signal(signal.SIGCONT)
        _, err = process.communicate(timeout=PATIENCE_S)
        assert process.returncode != 0
        for rank in (1, 2, 3):
            assert f"rank {rank}: rank 0 gave no sign of life within 3 s" in err
        assert "Traceback" not in err


def _step_until_error(engine: object) -> None:
    assert isinstance(engine, FrontEngine)
    engine.submit(PROMPTS[0], GREEDY)
    for _ in range(100):
        engine.step()


def _torchrun(node: int, port: int, *options: str) -> subprocess.Popen[str]:
    """One of two machines, as far as torchrun can tell; they have their network in common, nothing else is used."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"]
    command += ["--node-rank", str(node), "--master-addr", "127.0.0.1", "--master-port", str(port)]
    command += ["-m", "ostinato", "generate", PROMPTS[0], "--temperature", "0", "--max-tokens", "6"]
    command += ["--threads", "1", "--transport", "gloo", *options]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_torchrun_across_machines() -> None:
    with LLM(progress=False, threads=1) as llm:
        expected = llm.generate(PROMPTS[0], GREEDY)[0].outputs[0].text
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    nodes = [_torchrun(node, port, "--dp", "2") for node in (0, 1)]
    try:
        results = [node.communicate(timeout=PATIENCE_S) for node in nodes]
    finally:
        for node in nodes:
            node.kill()
    assert [node.returncode for node in nodes] == [0, 0], results
    assert results[0][0].strip() == expected.strip(), "rank 0 answers"
    assert results[1][0] == "", "the others do not"


@pytest.mark.parametrize("transport", ["shm", "gloo"])
def test_a_rank_that_ends_before_they_meet_is_named(transport: str) -> None:
    """Rank 0 waits for it in the store, which would wait for minutes."""
    program = RankProgram(lambda engine, message: message, module="ostinato.no_such_module")
    config = EngineConfig.of(dp_size=2, threads=1, transport=transport, progress=False)
    began = time.monotonic()
    with pytest.raises(ParallelError, match="rank 1 ended with status 1"):
        open_engine(config, lambda *args: None, program)
    assert time.monotonic() - began < PATIENCE_S
