"""Memory while a checkpoint loads: its own size once, not the file and the packed weights side by side."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

HIDDEN, WIDTH, EXPERTS, VOCAB = 512, 1024, 24, 2048
LARGEST = 1.2
"""Peak over the size of the weights, beside the constant."""
CONSTANT = 24 << 20
"""Workspace, a block of the file and its copy, tables, and what the allocator keeps."""

CONFIG = {
    "architectures": ["MixtralForCausalLM"],
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": WIDTH,
    "num_hidden_layers": 1,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "num_local_experts": EXPERTS,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 64,
    "torch_dtype": "bfloat16",
}

LOAD = """
import json, sys, torch
from ostinato.attention import ReferenceAttention
from ostinato.models import load_model
from ostinato.ops.cpu.opset import open_numba_ops

class NoCache:
    k, v, page_size = [], [], 16
    page_table = torch.zeros(1, 1, dtype=torch.int32)

def memory():
    with open("/proc/self/status") as lines:
        found = dict(line.split(":") for line in lines)
    return int(found["RssAnon"].split()[0]) << 10, int(found["VmRSS"].split()[0]) << 10

ops = open_numba_ops(weight_coding=sys.argv[2])
ops.pack_linear(torch.ones(64, 64).bfloat16())  # its kernels are not the weights'
before = memory()
seen = []
model = load_model(
    sys.argv[1], ops=ops, attention=ReferenceAttention(NoCache()), max_num_tokens=16, max_bs=4,
    progress=lambda done, total: seen.append(memory()),
)
seen.append(memory())
peaks = [max(now) - then for now, then in zip(zip(*seen), before)]
print(json.dumps([*peaks, ops.packed_size.stored, ops.packed_size.uncoded]))
"""


def checkpoint(directory: Path, *, fused: bool) -> int:
    """A random mixture of 80 MB; returns the bytes of its weights."""

    def draw(*shape: int) -> torch.Tensor:
        return torch.full(shape, 0.01, dtype=torch.bfloat16)

    p = "model.layers.0."
    tensors = {f"{p}self_attn.{name}_proj.weight": draw(HIDDEN, HIDDEN) for name in "qkvo"}
    for name in (f"{p}input_layernorm", f"{p}post_attention_layernorm", "model.norm"):
        tensors[f"{name}.weight"] = draw(HIDDEN)
    for name in ("model.embed_tokens", "lm_head"):
        tensors[f"{name}.weight"] = draw(VOCAB, HIDDEN)
    if fused:
        tensors[f"{p}mlp.gate.weight"] = draw(EXPERTS, HIDDEN)
        tensors[f"{p}mlp.experts.gate_up_proj"] = draw(EXPERTS, 2 * WIDTH, HIDDEN)
        tensors[f"{p}mlp.experts.down_proj"] = draw(EXPERTS, HIDDEN, WIDTH)
    else:
        tensors[f"{p}block_sparse_moe.gate.weight"] = draw(EXPERTS, HIDDEN)
        for e in range(EXPERTS):
            for name, shape in (("w1", (WIDTH, HIDDEN)), ("w3", (WIDTH, HIDDEN)), ("w2", (HIDDEN, WIDTH))):
                tensors[f"{p}block_sparse_moe.experts.{e}.{name}.weight"] = draw(*shape)
    (directory / "config.json").write_text(json.dumps(CONFIG))
    save_file(tensors, directory / "model.safetensors")
    return sum(tensor.nbytes for tensor in tensors.values())


@pytest.mark.parametrize(("fused", "coding"), [(False, "plain"), (True, "plain"), (True, "auto")])
def test_peak_memory_is_the_weights_once(tmp_path: Path, fused: bool, coding: str) -> None:
    size = checkpoint(tmp_path, fused=fused)
    done = subprocess.run(
        [sys.executable, "-c", LOAD, str(tmp_path), coding], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    anonymous, with_file, stored, uncoded = json.loads(done.stdout)
    size = size * stored // uncoded
    print(f"weights {size}, peak anonymous {anonymous}, with pages of the file {with_file}")
    assert size > 70_000_000 * stored // uncoded
    assert anonymous >= size  # the measurement sees the weights
    assert anonymous < LARGEST * size + CONSTANT
    assert with_file < LARGEST * size + CONSTANT + (8 << 20)
