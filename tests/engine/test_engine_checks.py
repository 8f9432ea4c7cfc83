"""Live checks: a graph that computes something else is caught, its answer is never served, its bucket runs eagerly."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ostinato import LLM, ConfigError, EngineConfig, SamplingParams
from ostinato.engine.rerun import rerun
from ostinato.engine.shadow import CheckOptions, StepChecks
from ostinato.engine.trace import read_trace
from ostinato.graphs import Tape, TapeBackend
from ostinato.padding import GraphKey, StepMode, StepShape

PROMPTS = ["It is a truth", "And the Lord said unto Moses", "To be"]
GREEDY = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)


def tamper(tape: Any, fault: Callable[[], object]) -> None:
    """Let every replay of a tape do something more at its end."""
    assert isinstance(tape, Tape)
    tape._calls, tape._whole = (*tape._calls, fault), None


def texts(llm: LLM, params: SamplingParams = GREEDY) -> list[Any]:
    return [(o.outputs[0].token_ids, o.outputs[0].logprobs) for o in llm.generate(PROMPTS, params)]


def break_logits(llm: LLM) -> GraphKey:
    """The decode graph of four rows gives row 1 another token."""
    worker, key = llm.engine.worker, GraphKey("decode", 4, 0, "")
    graph = worker.decode.graph(key)
    chosen = worker._chooser.tokens

    def fault() -> None:
        graph.outputs[1] += 0.5
        graph.outputs[1, 7] += 100
        chosen[1] = 7

    tamper(graph, fault)
    return key


@pytest.mark.parametrize(
    "params",
    [GREEDY, SamplingParams(seed=3, max_tokens=10, logprobs=2, ignore_eos=True)],
    ids=["greedy", "sampled"],
)
def test_a_wrong_graph_is_caught_and_quarantined(
    make_llm: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], params: SamplingParams
) -> None:
    llm = make_llm(shadow_rate=1.0, trace_dir=str(tmp_path))
    want = texts(llm, params)
    assert llm.stats()["graph"]["decode"]["mismatches"] == 0
    assert llm.stats()["graph"]["decode"]["checked"] > 5
    key = break_logits(llm)
    assert texts(llm, params) == want, "what was served is the eager result"
    stats = llm.stats()["graph"]["decode"]
    assert (stats["mismatches"], stats["quarantined"]) == (1, ["decode/4"])
    assert stats["eager_reasons"]["quarantined"] >= 7, (
        "every later step but the one that computed all KV anew"
    )
    assert key not in llm.engine.worker.decode.captured
    said = capsys.readouterr().err
    assert said.count("graph and eager run differ") == 1
    assert "bucket decode/4" in said
    assert "from row 1 on" in said
    (trace,) = tmp_path.glob("*.trace")
    assert str(trace) in said
    assert llm.stats()["checks"]["traces"] == [str(trace)]


def test_a_wrong_advance_is_caught(make_llm: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Steps that go on from the last one's buffers are compared with the step as the host knows it."""
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    llm = make_llm(shadow_rate=0.3, trace_dir=str(tmp_path))
    want = texts(llm, params)
    worker, key = llm.engine.worker, GraphKey("decode", 4, 0, "")
    view = worker.decode._served.view
    tamper(worker.decode._advances[key], lambda: view.positions[2].sub_(1))
    texts(llm, params)
    assert llm.stats()["graph"]["decode"]["quarantined"] == ["decode/4"]
    assert "positions[2] was" in capsys.readouterr().err
    assert texts(llm, params) == want


def test_prefill_steps_are_checked(make_llm: Any, tmp_path: Path) -> None:
    llm = make_llm(shadow_rate=1.0, trace_dir=str(tmp_path), enable_prefix_caching=False)
    want = texts(llm)
    (key,) = llm.engine.worker.prefill.captured
    graph = llm.engine.worker.prefill.graph(key)
    tamper(graph, lambda: graph.outputs.neg_())
    assert texts(llm) == want
    stats = llm.stats()["graph"]["prefill"]
    assert (stats["mismatches"], len(stats["quarantined"])) == (1, 1)
    assert stats["checked"] == 1


@pytest.mark.parametrize("memory", ["k", "v"])
def test_a_chunk_that_gives_nothing_is_checked_by_its_kv(
    make_llm: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], memory: str
) -> None:
    """All that a prompt's chunks before its last one leave are keys and values, which every later step reads."""
    options = {"chunked_prefill_size": 32, "enable_prefix_caching": False, "prefill_graph": "full"}
    llm = make_llm(shadow_rate=1.0, trace_dir=str(tmp_path), **options)
    prompt = [list(range(5, 75))]
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    want = [llm.generate(prompt, params)[0].outputs[0].token_ids for _ in range(3)][-1]
    worker = llm.engine.worker
    assert worker.prefill.stats.mismatches == 0
    (key,) = [key for key in worker.prefill.captured if key.size == 32]
    pages = getattr(worker.pool, memory)[0]
    tamper(worker.prefill.graph(key), lambda: pages[worker.pool.page_size :].add_(1))
    assert llm.generate(prompt, params)[0].outputs[0].token_ids == want
    assert worker.prefill.stats.mismatches == 1
    assert f"{memory} of layer 0 in the step's page 0 differ" in capsys.readouterr().err
    (trace,) = tmp_path.glob("*.trace")
    result = rerun(read_trace(trace), None, lambda *args: None)
    assert result.same("eager", "expected")
    assert result.same("replayed", "expected")
    assert f"{memory} of layer 0" in result.cell("replayed", "seen")


def test_checked_steps_count_once(make_llm: Any, tmp_path: Path) -> None:
    """Neither expert load nor rows are counted twice, and nothing is checked unless asked for."""
    plain, checked = make_llm(), make_llm(shadow_rate=1.0, trace_dir=str(tmp_path))
    for llm in (plain, checked):
        texts(llm)
        texts(llm)
    mine, theirs = plain.stats(), checked.stats()
    assert mine["expert_load"] == theirs["expert_load"]
    for kind in ("decode", "prefill"):
        ours, other = mine["graph"][kind], theirs["graph"][kind]
        for name in ("captures", "replays", "real_rows", "pad_rows", "eager_steps", "sizes"):
            assert ours[name] == other[name]
        assert ours["checked"] == 0
    assert not list(tmp_path.glob("*"))


def test_which_steps_are_due_follows_from_their_number() -> None:
    """The share is kept, two ranks choose alike, and only what a graph serves is checked."""

    class Ready:
        captured = (GraphKey("decode", 4, 0, ""),)
        backend = TapeBackend()

    runner: Any = Ready()
    no_pool: Any = None  # nothing is run
    four = StepShape(StepMode.DECODE, (3,), 3, 4, 4)
    two, eager = (
        StepShape(StepMode.DECODE, (2,), 2, 2, 2),
        StepShape(StepMode.DECODE, (4,), 4, 4, 4, eager_reason="no"),
    )

    def due(rate: float, shape: StepShape = four) -> list[bool]:
        checks = StepChecks(CheckOptions(rate), lambda found: (), None, no_pool)
        return [checks.due(runner, shape) for _ in range(4000)]

    assert due(0.05) == due(0.05)
    assert 130 < sum(due(0.05)) < 270
    assert (sum(due(1.0)), sum(due(0.0)), sum(due(1.0, two)), sum(due(1.0, eager))) == (4000, 0, 0, 0)


@pytest.mark.parametrize("rate", [-0.1, 1.5, True, "much"])
def test_a_rate_is_a_share(rate: Any) -> None:
    with pytest.raises(ConfigError, match="shadow_rate must be a number from 0 to 1"):
        EngineConfig(shadow_rate=rate)


def test_a_trace_that_cannot_be_written_ends_nothing(
    make_llm: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """At the start it is refused; a disk that fills later stops no request."""
    directory = tmp_path / "traces"
    llm = make_llm(shadow_rate=1.0, trace_dir=str(directory))
    directory.rmdir()
    directory.write_text("no directory")
    with pytest.raises(ConfigError, match="replay traces cannot be written to"):
        make_llm(shadow_rate=1.0, trace_dir=str(directory))
    want = texts(llm)
    break_logits(llm)
    assert texts(llm) == want
    assert "Replay trace: none" in capsys.readouterr().err
