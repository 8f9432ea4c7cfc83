"""The whole engine on Triton's kernels, interpreted where there is no GPU: the reference's tokens, and pads that count
for nothing.

One tiny mixture of experts, prompts that are prefilled in chunks beside decode rows, greedy and sampled.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from ostinato import LLM, SamplingParams
from ostinato.config import EngineConfig
from ostinato.engine import device
from ostinato.engine.device import choose_device
from ostinato.engine.launch import launch
from ostinato.errors import ConfigError

pytest.importorskip("triton")

GPU = torch.cuda.is_available()
TRITON = {"device": "cuda"} if GPU else {"kernels": "triton", "device": "cpu"}
MakeLLM = Callable[..., LLM]
PROMPTS: Any = [list(range(3, 22)), [5, 9, 2]]
PARAMS = [
    SamplingParams(max_tokens=5, ignore_eos=True),
    SamplingParams(max_tokens=5, ignore_eos=True, temperature=0.8, top_p=0.9, seed=7),
]
SIZES: dict[str, Any] = {
    "context_length": 32,
    "max_running_requests": 4,
    "chunked_prefill_size": 16,
    "max_prefill_tokens": 16,
    "num_pages": 16,
}


def answers(llm: LLM) -> list[list[int]]:
    return [list(r.outputs[0].token_ids) for r in llm.generate(PROMPTS, PARAMS)]


@pytest.fixture(scope="module")
def path(checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The first layer of the tiny checkpoint: interpreted kernels are slow."""
    whole, short = checkpoint("qwen3_moe"), tmp_path_factory.mktemp("one_layer")
    config = json.loads((whole / "config.json").read_text()) | {"num_hidden_layers": 1, "layer_types": None}
    (short / "config.json").write_text(json.dumps(config))
    kept = {
        name: tensor
        for name, tensor in load_file(whole / "model.safetensors").items()
        if not name.startswith(("model.layers.1.", "model.layers.2."))
    }
    save_file(kept, short / "model.safetensors")
    for file in whole.glob("tokenizer*"):
        shutil.copy(file, short)
    return short


def test_the_engine_gives_the_tokens_of_the_reference(make_llm: MakeLLM, path: Path) -> None:
    """A prompt in chunks beside decode rows, mixed steps, captured and replayed, greedy and sampled; prefills broken
    around attention, as on a GPU.
    """
    want = answers(make_llm(model=str(path), kernels="reference", **SIZES))
    llm = make_llm(model=str(path), **TRITON, mixed_prefill=True, prefill_graph="breakable", **SIZES)
    assert answers(llm) == want
    assert llm.stats()["graph"]["decode"]["replays"] > 0


def test_padding_changes_no_bit(
    load_module: Callable[[str], ModuleType], path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The padding contract's rig, with fewer and shorter requests: poison everywhere, eager and replayed."""
    rigs = load_module("contract/rig.py")
    monkeypatch.setattr(rigs, "LENGTHS", (5, 2, 17))
    monkeypatch.setattr(rigs, "SHARED_TOKENS", 0)
    with torch.no_grad():
        rig = rigs.Rig(path, **TRITON, graph="auto", capture="lazy", num_pages=40)
        batch = rig.decode([0, 2])
        clean = rig.clean(batch)
        assert torch.equal(rig.clean(rig.decode([2])).outputs[0], clean.outputs[1])
        assert not rig.broken(batch, clean, 4, way="eager")
        rig.padded(batch, 4)  # captures
        assert not rig.broken(batch, clean, 4)
        batch = rig.extend([(1, 2, 3)])
        clean = rig.clean(batch)
        rig.padded(batch, 8)
        assert not rig.broken(batch, clean, 8)


@pytest.mark.skipif(GPU, reason="needs a machine without CUDA")
def test_what_triton_cannot_do_here_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def refusal(**options: Any) -> str:
        with pytest.raises(ConfigError) as caught:
            launch(EngineConfig(**options), lambda *args: None)
        return str(caught.value)

    assert "needs a GPU and torch sees none" in refusal(device="cuda")
    assert "bfloat16 wrongly" in refusal(kernels="triton", dtype="bfloat16")
    assert "tp does not work" in refusal(kernels="triton", tp_size=2)
    assert "quantization does not work" in refusal(kernels="triton", quantization="int8")
    monkeypatch.delenv("TRITON_INTERPRET")
    assert "TRITON_INTERPRET=1" in refusal(kernels="triton")
    with pytest.raises(ConfigError, match="gpu_products 'library' needs device 'cuda'"):
        EngineConfig(gpu_products="library")


def test_options_that_a_gpu_does_not_serve_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read off the options alone, so a GPU need not be there."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)

    def refusal(**options: Any) -> str:
        with pytest.raises(ConfigError) as caught:
            choose_device(EngineConfig(device="cuda", **options))
        return str(caught.value)

    assert "kernels 'numba' run on the CPU" in refusal(kernels="numba")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert "unset TRITON_INTERPRET" in refusal()
    monkeypatch.delenv("TRITON_INTERPRET")
    assert "dp does not work" in refusal(dp_size=2)
    assert "rebalance_steps does not work" in refusal(rebalance_steps=10)
    monkeypatch.setattr(device, "find_spec", lambda name: None)
    assert "pip install 'ostinato[cuda]'" in refusal()


def test_every_family_gives_the_tokens_of_the_reference(
    request: pytest.FixtureRequest,
    make_llm: MakeLLM,
    checkpoint: Callable[[str], Path],
    checkpoints: ModuleType,
) -> None:
    """Only with `--exhaustive`: windows, chunked attention, every router, norm and rotation, in a short answer each."""
    if not request.config.getoption("--exhaustive"):
        pytest.skip("one of them runs always; this is the full list")
    params = SamplingParams(max_tokens=3, ignore_eos=True)
    differing = []
    for family in checkpoints.FAMILIES:
        options: dict[str, Any] = {"model": str(checkpoint(family)), **SIZES}
        want, got = (
            make_llm(**options, **kernels).generate([PROMPTS[0]], [params])[0].outputs[0].token_ids
            for kernels in ({"kernels": "reference"}, TRITON)
        )
        if want != got:
            differing.append((family, want, got))
    assert not differing
