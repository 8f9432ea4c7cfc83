"""`quantization="int8"` through the whole engine: what becomes int8, what does not, and how near it stays to bf16.

That a request does not depend on its company is tested with the other numeric paths in `contract/exactness`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from ostinato import LLM, SamplingParams

MakeLLM = Callable[..., LLM]

# Each from the end of a book, which was held out of the demo model's training.
HELD_OUT = (
    "After a proper resistance on the part of Mrs. Ferrars, just so violent and so steady as to preserve her "
    "from that reproach which she always seemed fearful of incurring, the reproach of being too amiable, "
    "Edward was admitted to her presence, and pronounced to be again her son.\n\nHer family had of late been "
    "exceedingly fluctuating. For many years of her life she had had two sons; but the crime and "
    "annihilation of Edward a few weeks ago, had robbed her of one; the similar annihilation of Robert had "
    "left her for a fortnight without any; and now, by the resuscitation of Edward, she had one again.\n\nIn "
    "spite of his being allowed once more to live, however, he did not feel the continuance of his existence "
    "secure, till he had revealed his present engagement;",
    "And he shewed me a pure river of water of life, clear as crystal, proceeding out of the throne of God "
    "and of the Lamb.\nIn the midst of the street of it, and on either side of the river, was there the tree "
    "of life, which bare twelve manner of fruits, and yielded her fruit every month: and the leaves of the "
    "tree were for the healing of the nations.\nAnd there shall be no more curse: but the throne of God and "
    "of the Lamb shall be in it; and his servants shall serve him:\nAnd they shall see his face; and his "
    "name shall be in their foreheads.\nAnd there shall be no night there; and they need no candle, neither "
    "light of the sun; for the Lord God giveth them light: and they shall reign for ever and ever.",
    "HIPPOLYTA\n'Tis strange, my Theseus, that these lovers speak of.\n\nTHESEUS\nMore strange than true. I "
    "never may believe\nThese antique fables, nor these fairy toys.\nLovers and madmen have such seething "
    "brains,\nSuch shaping fantasies, that apprehend\nMore than cool reason ever comprehends.\nThe lunatic, "
    "the lover, and the poet\nAre of imagination all compact:\nOne sees more devils than vast hell can "
    "hold;\nThat is the madman: the lover, all as frantic,\nSees Helen's beauty in a brow of Egypt:\nThe "
    "poet's eye, in a fine frenzy rolling,\nDoth glance from heaven to earth, from earth to heaven;",
)


def log_probabilities(llm: LLM) -> torch.Tensor:
    """Of the excerpts' tokens, one after the other."""
    params = SamplingParams(temperature=0.0, max_tokens=0, prompt_logprobs=0)
    values = []
    for output in llm.generate(list(HELD_OUT), params):
        assert output.prompt_logprobs is not None
        scored = zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True)
        values += [entry[token].logprob for token, entry in scored if entry is not None]
    return torch.tensor(values, dtype=torch.float64)


def test_near_bf16_on_held_out_text(make_llm: MakeLLM) -> None:
    """Perplexity within 1 % of bf16, every token's probability within a factor of 2; the same figures every time."""
    want = log_probabilities(make_llm(dtype="bfloat16"))
    ours = log_probabilities(make_llm(dtype="bfloat16", quantization="int8"))
    difference = ours - want
    assert len(ours) > 400
    assert math.exp(abs(difference.mean())) - 1 < 0.01
    assert 0 < difference.abs().max() < math.log(2)
    assert torch.equal(ours, log_probabilities(make_llm(dtype="bfloat16", quantization="int8")))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_is_int8(make_llm: MakeLLM, dtype: str) -> None:
    """Experts and attention; routers and the head keep the dtype of the checkpoint, and stats() tells."""
    llm = make_llm(dtype=dtype, quantization="int8")
    assert llm.stats()["ops"].endswith(".int8")
    model: Any = llm.engine.worker.model
    wide = getattr(torch, dtype)
    assert model.head.panels.dtype == wide
    for layer in model.layers:
        assert layer.ffn.router.panels.dtype == wide
        weights = layer.ffn.experts
        packed = (weights.gate_up, weights.down, layer.attention.qkv.panels, layer.attention.out.panels)
        assert {panels.dtype for panels in packed} == {torch.int8}
    assert llm.generate("And the", SamplingParams(temperature=0, max_tokens=4))[0].outputs[0].token_ids


def test_the_default_is_not_quantised(llm: LLM) -> None:
    assert "int8" not in llm.stats()["ops"]
