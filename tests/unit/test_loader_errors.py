"""Loading weights: every parameter is filled and every tensor used, or the error names it (F55)."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from ostinato.attention import ReferenceAttention
from ostinato.engine.launch import locate_model
from ostinato.errors import ModelError, PadContractError
from ostinato.graphs.stream import EagerStream
from ostinato.models import CausalLM, load_model, read_config, resolve_model
from ostinato.models.loader import WeightSource, weight_files
from ostinato.ops import ReferenceOps
from ostinato.padding import PadContract

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 24,
    "hidden_size": 16,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 32,
    "torch_dtype": "float32",
}
EXPERTS = {"architectures": ["MixtralForCausalLM"], "num_local_experts": 2, "num_experts_per_tok": 1}


def weights(sparse: str = "") -> dict[str, torch.Tensor]:
    """Tensors of the config above; `sparse` picks a naming of experts ("split", "fused")."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    tensors = {
        "model.embed_tokens.weight": draw(24, 16),
        "model.norm.weight": draw(16),
        "lm_head.weight": draw(24, 16),
    }
    for i in range(2):
        p = f"model.layers.{i}."
        tensors[f"{p}input_layernorm.weight"] = draw(16)
        tensors[f"{p}post_attention_layernorm.weight"] = draw(16)
        for name, rows in (("q", 16), ("k", 8), ("v", 8), ("o", 16)):
            tensors[f"{p}self_attn.{name}_proj.weight"] = draw(rows, 16)
        if not sparse:
            tensors[f"{p}mlp.gate_proj.weight"] = draw(12, 16)
            tensors[f"{p}mlp.up_proj.weight"] = draw(12, 16)
            tensors[f"{p}mlp.down_proj.weight"] = draw(16, 12)
            continue
        router, gate_up, down = draw(2, 16), draw(2, 24, 16), draw(2, 16, 12)
        if sparse == "fused":
            tensors[f"{p}mlp.gate.weight"] = router
            tensors[f"{p}mlp.experts.gate_up_proj"] = gate_up
            tensors[f"{p}mlp.experts.down_proj"] = down
            continue
        tensors[f"{p}block_sparse_moe.gate.weight"] = router
        for e in range(2):
            expert = f"{p}block_sparse_moe.experts.{e}."
            tensors[f"{expert}w1.weight"] = gate_up[e, :12].clone()
            tensors[f"{expert}w3.weight"] = gate_up[e, 12:].clone()
            tensors[f"{expert}w2.weight"] = down[e].clone()
    return tensors


def write(directory: Path, tensors: dict[str, torch.Tensor], **config: Any) -> Path:
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps({**CONFIG, **config}))
    save_file(tensors, directory / "model.safetensors")
    return directory


def shard(directory: Path, tensors: dict[str, torch.Tensor]) -> Path:
    """Two shards and an index instead of one file."""
    write(directory, tensors)
    (directory / "model.safetensors").unlink()
    names = sorted(tensors)
    files = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for file, held in files.items():
        save_file({name: tensors[name] for name in held}, directory / file)
    where = {name: file for file, held in files.items() for name in held}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    return directory


class NoCache:
    """A KV cache that nothing is written to."""

    k: list[torch.Tensor]
    v: list[torch.Tensor]
    page_table = torch.zeros(1, 1, dtype=torch.int32)
    page_size = 16


def load(directory: Path, **options: Any) -> CausalLM:
    attention = ReferenceAttention(NoCache())
    return load_model(
        directory, ops=ReferenceOps(), attention=attention, max_num_tokens=4, max_bs=4, **options
    )


def head(model: CausalLM) -> torch.Tensor:
    """The head's weights [vocab, hidden], through the model's own logits."""
    columns = [model.logits(row.unsqueeze(0), EagerStream())[0].clone() for row in torch.eye(16)]
    return torch.stack(columns, dim=1)


class AttendsToPads(ReferenceAttention):
    """A backend that says nothing about pads."""

    @property
    def pad_contract(self) -> PadContract:
        return PadContract("careless attention")


def test_attention_that_declares_nothing_about_pads_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PadContractError, match="careless attention does not honour"):
        load_model(
            write(tmp_path, weights()),
            ops=ReferenceOps(),
            attention=AttendsToPads(NoCache()),
            max_num_tokens=4,
            max_bs=4,
        )


def test_progress_ends_at_the_total(tmp_path: Path) -> None:
    tensors = weights()
    seen: list[tuple[int, int]] = []
    load(write(tmp_path, tensors), progress=lambda loaded, total: seen.append((loaded, total)))
    total = sum(tensor.nbytes for tensor in tensors.values())
    assert len(seen) == len(tensors)
    assert seen[-1] == (total, total)
    assert [loaded for loaded, _ in seen] == sorted({loaded for loaded, _ in seen})


def test_weights_do_not_alias_the_file(tmp_path: Path) -> None:
    tensors = weights()
    model = load(write(tmp_path, tensors))
    changed = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    save_file(changed, tmp_path / "model.safetensors")
    assert torch.equal(model.embedding, tensors["model.embed_tokens.weight"])


def test_a_head_of_its_own(tmp_path: Path) -> None:
    tensors = weights()
    for tied in (False, True):  # a head in the file is used also where the config ties it
        model = load(write(tmp_path, tensors, tie_word_embeddings=tied))
        torch.testing.assert_close(head(model), tensors["lm_head.weight"])


def test_a_tied_head_absent_from_the_file(tmp_path: Path) -> None:
    tensors = weights()
    del tensors["lm_head.weight"]
    model = load(write(tmp_path, tensors, tie_word_embeddings=True))
    torch.testing.assert_close(head(model), tensors["model.embed_tokens.weight"])
    write(tmp_path, tensors, tie_word_embeddings=False)
    with pytest.raises(ModelError, match=r"has no tensor lm_head\.weight"):
        load(tmp_path)


@pytest.mark.parametrize("name", sorted(weights()))
def test_every_missing_tensor_is_named(tmp_path: Path, name: str) -> None:
    tensors = weights()
    del tensors[name]
    with pytest.raises(ModelError, match=f"has no tensor {name}"):
        load(write(tmp_path, tensors))


@pytest.mark.parametrize("name", sorted(weights("split")))
def test_every_missing_tensor_of_a_mixture_is_named(tmp_path: Path, name: str) -> None:
    tensors = weights("split")
    del tensors[name]
    with pytest.raises(ModelError, match=f"has no tensor {name}"):
        load(write(tmp_path, tensors, **EXPERTS))


def test_an_unexpected_tensor_is_named(tmp_path: Path) -> None:
    tensors = {**weights(), "model.layers.0.self_attn.q_proj.bias": torch.zeros(16)}
    with pytest.raises(ModelError, match=r"unexpected tensor model\.layers\.0\.self_attn\.q_proj\.bias,"):
        load(write(tmp_path, tensors))
    tensors["model.layers.2.input_layernorm.weight"] = torch.zeros(16)
    with pytest.raises(ModelError, match=r"q_proj\.bias and 1 more"):
        load(write(tmp_path, tensors))


def test_rope_frequencies_in_old_checkpoints_are_left_out(tmp_path: Path) -> None:
    buffer = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    load(write(tmp_path, {**weights(), **buffer}))


def test_a_wrong_shape_names_both(tmp_path: Path) -> None:
    tensors = {**weights(), "model.layers.1.self_attn.k_proj.weight": torch.zeros(16, 16)}
    with pytest.raises(
        ModelError, match=r"k_proj\.weight has shape \[16, 16\], config\.json asks for \[8, 16\]"
    ):
        load(write(tmp_path, tensors))


def test_a_quantised_tensor_is_refused(tmp_path: Path) -> None:
    tensors = {**weights(), "model.norm.weight": torch.ones(16, dtype=torch.int8)}
    with pytest.raises(ModelError, match=r"model\.norm\.weight has dtype I8"):
        load(write(tmp_path, tensors))


@pytest.mark.parametrize("keep", [0, 4, 100, -1])
def test_a_truncated_file(tmp_path: Path, keep: int) -> None:
    path = write(tmp_path, weights()) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ModelError, match=r"truncated or damaged .* download the checkpoint again"):
        load(tmp_path)


def test_a_header_without_end(tmp_path: Path) -> None:
    """JSON nested deeper than it can be read is damage as any other."""
    header = b"[" * 100_000
    path = write(tmp_path, weights()) / "model.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(ModelError, match=r"truncated or damaged \(its header cannot be read"):
        load(tmp_path)


def test_shards_hold_the_same_model(tmp_path: Path) -> None:
    tensors = weights()
    model = load(shard(tmp_path, tensors))
    assert torch.equal(model.embedding, tensors["model.embed_tokens.weight"])


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    (shard(tmp_path, weights()) / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ModelError, match=r"shard model-00002-of-00002\.safetensors .* is missing"):
        load(tmp_path)


def test_shards_without_an_index(tmp_path: Path) -> None:
    (shard(tmp_path, weights()) / "model.safetensors.index.json").unlink()
    with pytest.raises(ModelError, match=r"has shards but no model\.safetensors\.index\.json"):
        load(tmp_path)


@pytest.mark.parametrize(
    "index",
    [
        "",
        "{}",
        '{"weight_map": {}}',
        '{"weight_map": [1]}',
        '{"weight_map": {"a": "../x.safetensors"}}',
        "[" * 100_000,
    ],
)
def test_a_damaged_index(tmp_path: Path, index: str) -> None:
    (shard(tmp_path, weights()) / "model.safetensors.index.json").write_text(index)
    with pytest.raises(ModelError, match="download the checkpoint again"):
        load(tmp_path)


def test_a_tensor_in_two_shards(tmp_path: Path) -> None:
    path = shard(tmp_path, weights()) / "model-00001-of-00002.safetensors"
    other = path.with_name("model-00002-of-00002.safetensors")
    other.write_bytes(path.read_bytes())
    with pytest.raises(ModelError, match="is there twice"):
        load(tmp_path)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.00.pt"])
def test_pickled_weights_are_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"\x80\x04.")
    with pytest.raises(ModelError, match=r"pickled weights only, .* convert them to safetensors"):
        weight_files(tmp_path)


def test_gguf_is_not_what_is_read(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(ModelError, match="has GGUF files only; take the safetensors checkpoint"):
        weight_files(tmp_path)
    with pytest.raises(ModelError, match="is a GGUF file"):
        resolve_model(tmp_path / "model.gguf")


def test_no_weights_at_all(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"has no model\.safetensors"):
        weight_files(tmp_path)


def test_fused_and_split_experts_are_the_same_model(tmp_path: Path) -> None:
    split = load(write(tmp_path / "split", weights("split"), **EXPERTS))
    fused = load(write(tmp_path / "fused", weights("fused"), **EXPERTS))
    for a, b in zip(split.layers, fused.layers, strict=True):
        assert torch.equal(a.ffn.experts.gate_up, b.ffn.experts.gate_up)  # type: ignore[attr-defined]
        assert torch.equal(a.ffn.experts.down, b.ffn.experts.down)  # type: ignore[attr-defined]
        assert torch.equal(a.ffn.router.weight, b.ffn.router.weight)  # type: ignore[attr-defined]


def test_router_weights_are_fp32_and_experts_keep_the_dtype(tmp_path: Path) -> None:
    write(tmp_path, weights("split"), **EXPERTS)
    layer = load(tmp_path, config=read_config(tmp_path, dtype=torch.bfloat16)).layers[0].ffn
    assert layer.router.weight.dtype == torch.float32  # type: ignore[attr-defined]
    assert layer.experts.down.dtype == torch.bfloat16  # type: ignore[attr-defined]


def test_renamed_and_ignored_prefixes(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"language_model.a": torch.ones(2), "vision.b": torch.ones(3)}, path)
    source = WeightSource(tmp_path, renamed=(("language_model.", ""),), ignored=("vision.",))
    assert torch.equal(source.take("a", (2,), torch.float32), torch.ones(2))
    source.finish()


def test_resolve_a_directory_a_file_and_nonsense(tmp_path: Path) -> None:
    assert resolve_model(str(tmp_path)) == tmp_path


def test_the_demo_has_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A directory of that name comes first, as with every other name."""
    monkeypatch.chdir(tmp_path)
    assert locate_model("demo") == locate_model(None)
    (tmp_path / "demo").mkdir()
    assert locate_model("demo") == Path("demo")
    (tmp_path / "file").touch()
    with pytest.raises(ModelError, match="is a file; give the checkpoint's directory"):
        resolve_model(tmp_path / "file")
    for name in ("./not-there", "/not/there", "a/b/c", "", tmp_path / "not-there"):
        with pytest.raises(ModelError, match="neither a directory nor a hub id"):
            resolve_model(name)


def test_a_hub_id_is_downloaded_without_code_or_pickles(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[str, Any] = {}

    def snapshot_download(name: str, **options: Any) -> str:
        asked.update(options, name=name)
        return str(tmp_path)

    hub = ModuleType("huggingface_hub")
    hub.snapshot_download = snapshot_download  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    assert resolve_model("owner/name") == tmp_path
    assert asked["name"] == "owner/name"
    assert set(asked["allow_patterns"]) == {"*.safetensors", "*.json", "*.jinja"}


def test_a_failed_download_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def snapshot_download(name: str, **options: Any) -> str:
        raise OSError("no network\nlong trace")

    hub = ModuleType("huggingface_hub")
    hub.snapshot_download = snapshot_download  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    with pytest.raises(ModelError, match=r"\(no network\); did you mean 'smollm2'\? Else check the name"):
        resolve_model("smollm-2")
    with pytest.raises(ModelError, match=r"owner/name .*\(no network\); check the name") as error:
        resolve_model("owner/name")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("tied", [False, True])
def test_the_embedding_lies_where_everything_does(tmp_path: Path, tied: bool) -> None:
    """Also where the head has weights of its own: a GPU's kernels read no table of the host."""
    tensors = weights()
    if tied:
        del tensors["lm_head.weight"]
    embedding = load(write(tmp_path, tensors, tie_word_embeddings=tied), device="meta").embedding
    assert isinstance(embedding, torch.Tensor)
    assert embedding.device.type == "meta"
