"""The comparison with other engines, without the engines: files, protocol, accounting and what is shown."""

from __future__ import annotations

import importlib
import json
import sys
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from gguf import GGUFReader
from safetensors.torch import load_file

from ostinato.models.gguf_checkpoint import unpermute

BENCH = Path(__file__).parents[2] / "bench"


@pytest.fixture(scope="module")
def bench() -> Any:
    """Import a module of bench/ as its scripts do."""
    before = list(sys.path)
    sys.path[:0] = [str(BENCH), str(BENCH / "peers")]
    yield importlib.import_module
    sys.path[:] = before


@pytest.fixture(scope="module")
def tiny(bench: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    cache = tmp_path_factory.mktemp("checkpoints")
    return bench("checkpoints").checkpoint("tiny", cache, cache)


def turn(
    number: int, own: float, *, kept: bool = True, eager: float = 2.0, grouped: float = 4.0
) -> dict[str, Any]:
    return {
        "case": {"name": "decode b1", "batch": 1, "context": 32, "steps": 8, "warmup": 4, "prefills": 0},
        "number": number,
        "kept": kept,
        "tokens_per_second": {"ostinato": own, "t eager": eager, "t grouped_mm": grouped},
        "cores_of_others": {"ostinato": 0.0, "t eager": 0.1, "t grouped_mm": 0.3},
        "ceilings": {"bytes": 1e9, "operations": 1e12},
    }


@pytest.fixture
def record(bench: Any, tiny: Any) -> dict[str, Any]:
    labels = [("ostinato", "ostinato"), ("t eager", "transformers"), ("t grouped_mm", "transformers")]
    return {
        "model": "tiny",
        "precision": "bf16",
        "config": tiny.config,
        "contestants": [{"label": label, "peer": peer} for label, peer in labels],
        "date": "2026-01-01",
        "machine": bench("machine").describe(),
        "threads": 2,
        "versions": {"ostinato-hf": {"weights stored": "0.8"}},
        "active_experts": {"decode b1": 2.0},
        "turns": [
            turn(0, 1.0, kept=False),
            turn(1, 8.0),
            turn(2, 100.0, kept=False),
            turn(3, 6.0, eager=5.0),
            turn(4, 12.0, grouped=8.0),
        ],
        "texts": [],
    }


@pytest.mark.parametrize("kind", ["bf16", "q8_0"])
def test_gguf_holds_the_checkpoints_weights(tiny: Any, kind: str) -> None:
    from gguf.quants import dequantize

    weights: dict[str, torch.Tensor] = {}
    for path in tiny.directory.glob("*.safetensors"):
        weights |= load_file(path)
    tensors = {entry.name: entry for entry in GGUFReader(tiny.path(f"gguf-{kind}")).tensors}

    def read(name: str) -> torch.Tensor:
        return torch.from_numpy(dequantize(tensors[name].data, tensors[name].tensor_type).copy())

    experts = torch.stack(
        [weights[f"model.layers.1.mlp.experts.{e}.up_proj.weight"] for e in range(8)]
    ).float()
    for found, wanted in (
        (read("token_embd.weight"), weights["model.embed_tokens.weight"].float()),
        (read("blk.1.ffn_up_exps.weight"), experts),
        (read("blk.0.attn_q.weight"), weights["model.layers.0.self_attn.q_proj.weight"].float()),
    ):
        if kind == "bf16":
            assert torch.equal(found, wanted)
        else:
            assert (found - wanted).abs().max() <= wanted.abs().max() / 127
    assert torch.equal(read("blk.0.ffn_gate_inp.weight"), weights["model.layers.0.mlp.gate.weight"].float())
    assert len(tensors) == 2 * 12 + 3


def test_llama_files_rotate_pairs(bench: Any) -> None:
    weight = torch.arange(48.0).view(16, 3)
    paired = bench("gguf_file")._rotary_order(weight, 2)
    assert not torch.equal(paired, weight)
    assert torch.equal(unpermute(paired, 2), weight)


def test_the_moe_reads_554_megabytes_a_token(bench: Any) -> None:
    checkpoints: ModuleType = bench("checkpoints")
    costs = bench("limits").Costs.of(checkpoints._config(checkpoints.RANDOM["moe"]))
    assert costs.num_bytes(8, 0) == pytest.approx(555.7e6, rel=1e-3)
    assert costs.operations(1, 1, 0) == pytest.approx(costs.num_bytes(8, 0))


def test_rows_that_nobody_wants_need_keys_and_values_alone(bench: Any) -> None:
    checkpoints: ModuleType = bench("checkpoints")
    costs = bench("limits").Costs.of(checkpoints._config(checkpoints.RANDOM["moe"]))
    query_and_output, router, experts = 2 * 1024 * 1024, 64 * 1024, 8 * 3 * 1024 * 512
    scores = 4 * 1024 * (511 * 512 // 2)
    assert costs.spared(512, 1) == 2 * 511 * (query_and_output + router + experts) + scores
    assert costs.spared(512, 512) == 0


def test_limits_are_the_slower_of_reading_and_computing(bench: Any, tiny: Any) -> None:
    limits = bench("limits")
    costs = limits.Costs.of(tiny.config)
    fast, slow = 1e15, 1e3
    reading = limits.decode_seconds(costs, 1, 32, None, {"bytes": slow, "operations": fast})
    assert reading == pytest.approx(costs.num_bytes(2, 32) / slow)
    computing = limits.prefill_seconds(costs, 512, {"bytes": fast, "operations": slow})
    assert computing == pytest.approx(costs.operations(512, 1, 512 * 513 / 2) / slow)
    kept = limits.prefill_seconds(costs, 512, {"bytes": fast, "operations": slow}, kept=1)
    assert kept == pytest.approx(computing - costs.spared(512, 1) / slow)
    assert limits.decode_seconds(costs, 8, 32, None, {"bytes": slow, "operations": fast}) is None


def test_ratios_are_of_turns_that_count_to_the_best_mode(bench: Any, record: dict[str, Any]) -> None:
    (case,) = bench("report").summarise(record)
    assert (case.turns, case.discarded) == (3, 1)
    assert case.ratios == {"transformers": [8 / 4, 6 / 5, 12 / 8]}
    assert len(case.shares) == 3
    assert all(
        0.8 < stored / share < 1 for stored, share in zip(case.stored_shares, case.shares, strict=True)
    )


def test_table_and_plot(bench: Any, record: dict[str, Any], tmp_path: Path) -> None:
    report = bench("report")
    report.write_race(record, tmp_path)
    (tmp_path / "parallel.json").write_text('{"model": "moe-r1"}')  # another bench's, which is no race
    table = report.write_summary(tmp_path).read_text()
    assert "| decode b1 | 8.0 | 2.0 | 4.0 | **1.50** (1.20–2.00) |" in table
    assert "3 (+1 discarded)" in table
    ElementTree.fromstring((tmp_path / "compare.svg").read_text())


def test_races_on_other_machines_with_other_rules_or_peers_stand_beside_each_other(
    bench: Any, record: dict[str, Any], tmp_path: Path
) -> None:
    report = bench("report")
    own, mode, *_ = record["contestants"]
    record["machine"]["family_model_stepping"] = ["25", "17", "1"]
    for other in (
        record | {"machine": record["machine"] | {"family_model_stepping": ["26", "2", "1"]}},
        record | {"machine": record["machine"] | {"family_model_stepping": [None, None, None]}},
        record,
        record | {"memory_from": 60.0},
        record | {"contestants": [own, mode | {"peer": "llamacpp"}]},
        record | {"versions": {"ceilings-hf": {"isa": "avx2"}}},
        record | {"date": "later"},  # takes the place of the first
    ):
        report.write_race(other, tmp_path)
    found = report.write_summary(tmp_path).read_text().splitlines()
    titles = [line for line in found if line.startswith("## ")]
    plain = "## tiny, bf16, beside transformers"
    assert sorted(titles) == sorted(
        [
            plain,
            f"{plain}, family 26 model 2",
            f"{plain}, family 25 model 17",
            f"{plain}, memory at 60 GB/s or more, family 25 model 17",
            "## tiny, bf16, beside llama.cpp, family 25 model 17",
            "## tiny, bf16, avx2 alone, beside transformers, family 25 model 17",
        ]
    )


def test_a_case_without_turns_shows_none(bench: Any, record: dict[str, Any]) -> None:
    record["turns"] = [turn(1, 8.0, kept=False)]
    report = bench("report")
    assert "| decode b1 | – | – | – | – | – | – | – | 0 (+1 discarded) |" in report.section(record)
    ElementTree.fromstring(report.plot([record]))


@pytest.mark.parametrize(("margin", "agree"), [(0.0, True), (0.1, True), (2.0, False), (None, False)])
def test_texts_may_part_at_a_tie_only(bench: Any, margin: float | None, agree: bool) -> None:
    compare = bench("compare")
    same = {"tokens": compare.TEXT_TOKENS, "margin": None}
    assert compare.texts_agree([{"equal": {"a": same}}])
    assert compare.texts_agree([{"equal": {"a": same, "b": {"tokens": 3, "margin": margin}}}]) is agree


def test_a_batch_out_of_step_is_refused(bench: Any) -> None:
    answers = iter([{0: [1]}, {0: [1, 2], 1: [1]}])
    with pytest.raises(RuntimeError, match="advance together"):
        bench("protocol").decode_in_steps(2, lambda: next(answers), 0, 4)


def test_timed_tokens_leave_out_prefill_and_warmup(bench: Any) -> None:
    protocol = bench("protocol")
    state = [0]

    def step() -> dict[int, list[int]]:
        state[0] += 1
        return {row: list(range(state[0])) for row in range(3)}

    decoded = protocol.decode_in_steps(3, step, 2, 5)
    assert (decoded.tokens, [len(ids) for ids in decoded.ids]) == (15, [8, 8, 8])
    bare = protocol.decode_in_rounds(lambda: [0, 0], lambda last: [token + 1 for token in last], 2, 5)
    assert (bare.tokens, bare.ids) == (10, [list(range(8))] * 2)


ENGINE = """
from protocol import serve
print("a library's noise")
def load(request):
    return {"model": request["model"]}
def spin(request):
    end = __import__("time").process_time() + 0.1
    while __import__("time").process_time() < end:
        pass
    return 1 // request["divisor"]
serve({"load": load, "spin": spin})
"""


def stopped(process: int) -> bool:
    """Whether a process comes to a stop; the signal takes a moment."""
    for _ in range(200):
        if Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] == "T":
            return True
        time.sleep(0.01)
    return False


def test_a_process_answers_and_rests(bench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engines, machine = bench("engines"), bench("machine")
    (tmp_path / "engine.py").write_text(f"import sys; sys.path.append({str(BENCH / 'peers')!r})" + ENGINE)
    monkeypatch.setattr(engines, "PEERS", tmp_path)
    peer = engines.Peer("engine.py")
    runner = engines.Runner("fake", peer, engines.python_of(None, tmp_path), tmp_path / "log", 1)
    try:
        assert runner.load(model="some") == {"model": "some"}
        session = runner._process.pid
        before = machine.session_seconds(session)
        assert runner.ask("spin", divisor=1).value == 1
        assert machine.session_seconds(session) > before
        assert stopped(session)
        with pytest.raises(engines.PeerError, match="ZeroDivisionError"):
            runner.ask("spin", divisor=0)
        with pytest.raises(engines.PeerError, match="cannot nothing"):
            runner.ask("nothing")
    finally:
        runner.close()
    assert "a library's noise" in (tmp_path / "log").read_text()


def test_unknown_names_are_refused(bench: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench("compare").parse(["--peers", "sglang"])
    assert "'sglang' is none of llamacpp" in capsys.readouterr().err


def test_the_vocabulary_is_as_large_as_the_model_says(tiny: Any) -> None:
    from ostinato.text.tokenizer import Tokenizer

    tokenizer = Tokenizer.from_dir(tiny.directory)
    assert tokenizer.vocab_size == json.loads((tiny.directory / "config.json").read_text())["vocab_size"]
    assert tokenizer.decode(tokenizer.encode("two words")) == "two words"
