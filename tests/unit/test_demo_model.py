"""The bundled demo model: it is small, whole, really mixes experts, and knows its texts."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

DEMO = Path(str(files("ostinato") / "demo"))
# From the last chapter of "Persuasion", which was held out of training.
HELD_OUT = (
    "Who can be in doubt of what followed? When any two young people take it into their heads to marry, "
    "they are pretty sure by perseverance to carry their point, be they ever so poor, or ever so "
    "imprudent, or ever so little likely to be necessary to each other's ultimate comfort. This may be "
    "bad morality to conclude with, but I believe it to be truth; and if such parties succeed, how "
    "should a Captain Wentworth and an Anne Elliot, with the advantage of maturity of mind, "
    "consciousness of right, and one independent fortune between them, fail of bearing down every "
    "opposition?"
)


@pytest.fixture(scope="module")
def config() -> dict[str, Any]:
    content: dict[str, Any] = json.loads((DEMO / "config.json").read_text())
    return content


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(DEMO / "tokenizer.json"))


@pytest.fixture(scope="module")
def model() -> Any:
    return AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def loss(model: Any) -> Callable[[list[int]], float]:
    """Nats a token of a list of ids."""

    def measure(ids: list[int]) -> float:
        rows = torch.tensor([ids])
        with torch.no_grad():
            value: float = model(rows, labels=rows).loss.item()
        return value

    return measure


def test_files_and_size() -> None:
    expected = {"config.json", "generation_config.json", "model.safetensors", "README.md"}
    assert {path.name for path in DEMO.iterdir()} == expected | {"tokenizer.json", "tokenizer_config.json"}
    assert sum(path.stat().st_size for path in DEMO.iterdir()) <= 8_000_000


def test_shape(config: dict[str, Any]) -> None:
    assert config["num_experts"] >= 8
    assert config["num_experts_per_tok"] == 2
    assert config["head_dim"] == 64
    assert config["max_position_embeddings"] >= 512


def test_weights_are_finite_bf16(config: dict[str, Any]) -> None:
    tensors = load_file(DEMO / "model.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    assert all(tensor.isfinite().all() for tensor in tensors.values())
    assert 3_000_000 <= sum(tensor.numel() for tensor in tensors.values()) <= 4_200_000
    assert "lm_head.weight" not in tensors
    assert config["tie_word_embeddings"] is True


def test_begin_token_comes_first_and_ids_agree(config: dict[str, Any], tokenizer: Tokenizer) -> None:
    names = json.loads((DEMO / "tokenizer_config.json").read_text())
    generation = json.loads((DEMO / "generation_config.json").read_text())
    assert tokenizer.encode("Emma").ids[0] == config["bos_token_id"] == generation["bos_token_id"]
    assert tokenizer.token_to_id(names["bos_token"]) == config["bos_token_id"]
    assert tokenizer.token_to_id(names["eos_token"]) == config["eos_token_id"] == generation["eos_token_id"]
    assert tokenizer.get_vocab_size() == config["vocab_size"]


@settings(deadline=None, max_examples=60)
@given(text=st.text(max_size=40))
def test_any_text_comes_back(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_held_out_text_is_likelier_than_its_words_in_disorder(
    loss: Callable[[list[int]], float], tokenizer: Tokenizer
) -> None:
    words = HELD_OUT.split(" ")
    order = torch.randperm(len(words), generator=torch.Generator().manual_seed(3)).tolist()
    ordered = loss(tokenizer.encode(HELD_OUT).ids)
    disordered = loss(tokenizer.encode(" ".join(words[i] for i in order)).ids)
    assert math.exp(ordered) < 70
    assert disordered > ordered + 0.7


def test_text_goes_on_in_the_manner_of_its_source(model: Any, tokenizer: Tokenizer) -> None:
    def go_on(prompt: str) -> str:
        ids = torch.tensor([tokenizer.encode(prompt).ids])
        with torch.no_grad():
            out = model.generate(ids, max_new_tokens=40, do_sample=False)
        return tokenizer.decode(out[0, ids.shape[1] :].tolist())

    assert re.search(r"\b(unto|thou|thee|shall|the LORD|of the)\b", go_on("And the LORD said unto Moses,"))
    assert re.search(r"\b(she|her|had|Mrs)\b", go_on("Mrs. Bennet was"))


def test_all_experts_are_used(model: Any, tokenizer: Tokenizer) -> None:
    verse = "\n\nAnd God said, Let there be light: and there was light.\n\nHAMLET.\nTo be, or not to be."
    ids = torch.tensor([tokenizer.encode(HELD_OUT + verse).ids])
    with torch.no_grad():
        router_logits = model(ids, output_router_logits=True).router_logits
    for layer in router_logits:
        counts = torch.bincount(layer.topk(2).indices.flatten(), minlength=layer.shape[-1])
        shares = counts / counts.sum()
        entropy = -(shares * shares.clamp_min(1e-9).log()).sum() / math.log(len(shares))
        assert counts.min() > 0
        assert entropy > 0.9


def test_the_card_states_what_was_measured(model: Any) -> None:
    card = (DEMO / "README.md").read_text()
    assert f"{sum(p.numel() for p in model.parameters()) / 1e6:.2f} million" in card
    perplexities = dict(
        re.findall(r"^\| ([A-Z][\w ]+) \| [\d,]+ \| [\d,]+ \| ([\d.]+) \|", card, re.MULTILINE)
    )
    assert set(perplexities) == {"Jane Austen", "King James Bible", "Shakespeare"}
    assert all(1 < float(value) < 60 for value in perplexities.values())
    assert "public domain" in card
