"""The fetched SmolLM2 checkpoints under transformers: tokenizer, chat template and answers are right."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

SENTENCE = "Hello, I have 12345 apples.\n\n  Ünïcödé 日本 🦊"
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
PROMPT = (
    "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
    "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
)


def answer(path: Path) -> tuple[Any, str]:
    """The model (bf16) and its greedy answer to the question."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).eval()
    tokenizer = AutoTokenizer.from_pretrained(path)
    prompt = tokenizer.apply_chat_template(QUESTION, tokenize=False, add_generation_prompt=True)
    assert prompt == PROMPT
    inputs = tokenizer(prompt, return_tensors="pt", add_special_tokens=False)
    with torch.no_grad():
        ids = model.generate(**inputs, max_new_tokens=12, do_sample=False)
    return model, tokenizer.decode(ids[0, inputs.input_ids.shape[1] :])


@pytest.fixture(scope="module")
def tokenizer(smollm2_path: Path) -> Tokenizer:
    return Tokenizer.from_file(str(smollm2_path / "tokenizer.json"))


def test_every_token_that_is_text_encodes_to_itself(tokenizer: Tokenizer) -> None:
    size = tokenizer.get_vocab_size()
    assert size == 49152
    texts = tokenizer.decode_batch([[index] for index in range(size)], skip_special_tokens=False)
    # A token that is part of a character has no text of its own.
    whole = [(index, text) for index, text in enumerate(texts) if "\ufffd" not in text]
    assert len(whole) > 48500
    encoded = tokenizer.encode_batch([text for _, text in whole])
    wrong = [index for (index, _), found in zip(whole, encoded, strict=True) if found.ids != [index]]
    assert wrong == []


def test_digits_spaces_and_special_tokens(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("In 2024, 17%").tokens == ["In", "Ġ", *"2024", ",", "Ġ", *"17", "%"]
    assert tokenizer.decode(tokenizer.encode(SENTENCE).ids) == SENTENCE
    assert tokenizer.encode("<|im_start|>user<|im_end|>").ids[::2] == [1, 2]
    assert tokenizer.encode("hi").ids == [tokenizer.token_to_id("hi")]


def test_dense_model_answers(smollm2_path: Path) -> None:
    model, text = answer(smollm2_path)
    assert text == "The capital of France is Paris.<|im_end|>"
    assert sum(p.numel() for p in model.parameters()) == 134_515_008


def test_mixture_answers_and_its_router_chooses(smollm2_moe_path: Path) -> None:
    config = json.loads((smollm2_moe_path / "config.json").read_text())
    assert (config["num_local_experts"], config["num_experts_per_tok"]) == (8, 2)
    model, text = answer(smollm2_moe_path)
    assert "Paris" in text
    tokenizer = AutoTokenizer.from_pretrained(smollm2_moe_path)
    ids = tokenizer(PROMPT + text + SENTENCE, return_tensors="pt", add_special_tokens=False).input_ids
    with torch.no_grad():
        router_logits = model(ids, output_router_logits=True).router_logits
    assert len(router_logits) == 30
    pairs = [layer.topk(2).indices.sort(-1).values.unique(dim=0) for layer in router_logits]
    # 28 pairs of experts exist; a router that ignores its token would use one of them.
    assert sum(len(p) for p in pairs) / len(pairs) > 8
