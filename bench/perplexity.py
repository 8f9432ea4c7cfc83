"""Perplexity of a model on held-out text in several settings, through ostinato's own engine.

    python bench/perplexity.py [--models demo,smollm2,smollm2-moe] [--settings bfloat16,int8] [--tokens 8192]

The text is what the demo model's training left out (public domain, fetched once into the cache), or --text. It is cut
into windows of --length tokens, spread evenly over each source and each read from nothing. All settings read the same
windows, so the change against the first setting is known much better than either perplexity: its standard error is
that of the mean over paired tokens. A setting is a dtype, or "int8": bfloat16 with that quantization.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from ostinato import LLM, SamplingParams
from ostinato.config import QUANTIZATIONS, cache_dir
from ostinato.text.tokenizer import Tokenizer

sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))
from demo_corpus import load_sources

DTYPES = ("bfloat16", "float32")


@dataclass(frozen=True, slots=True)
class Score:
    """Perplexity of some windows; `change` is relative to a first setting (0.01: one percent), with its error."""

    setting: str
    ops: str
    perplexity: float
    change: float
    error: float
    largest: float  # absolute difference of one token's log-probability


def options_of(setting: str) -> dict[str, Any]:
    """Engine options of a setting."""
    if setting in QUANTIZATIONS:
        return {"dtype": "bfloat16", "quantization": setting}
    return {"dtype": setting}


def windows(texts: Mapping[str, str], tokenizer: Tokenizer, tokens: int, length: int) -> list[list[int]]:
    """About `tokens` tokens in windows of `length`, as many of each text, after what the tokenizer puts in front."""
    front = tokenizer.encode("")
    body = length - len(front)
    count = max(1, tokens // length // len(texts))
    found = []
    for name, text in texts.items():
        ids = tokenizer.encode(text, add_special_tokens=False)
        if len(ids) < body:
            raise SystemExit(f"{name} has {len(ids)} tokens, a window {body}; lower --length")
        stride = (len(ids) - body) // max(count - 1, 1)
        found += [[*front, *ids[i * stride : i * stride + body]] for i in range(count)]
    return found


def log_probabilities(llm: LLM, prompts: Sequence[list[int]]) -> torch.Tensor:
    """Of every token but each window's first, float64."""
    params = SamplingParams(temperature=0.0, max_tokens=0, prompt_logprobs=0)
    outputs = llm.generate(list(prompts), params, progress=False)
    values = []
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output.prompt_logprobs is not None
        for token, entry in zip(prompt[1:], output.prompt_logprobs[1:], strict=True):
            assert entry is not None
            values.append(entry[token].logprob)
    return torch.tensor(values, dtype=torch.float64)


def score(setting: str, ops: str, ours: torch.Tensor, first: torch.Tensor) -> Score:
    """A setting's score beside the first one's log-probabilities of the same tokens."""
    difference = first - ours
    return Score(
        setting,
        ops,
        float((-ours.mean()).exp()),
        float(difference.mean().exp()) - 1,
        float(difference.std()) / len(difference) ** 0.5,
        float(difference.abs().max()),
    )


def measure(model: str, settings: Sequence[str], options: argparse.Namespace) -> list[Score]:
    """All settings of one model, on the same windows."""
    scores: list[Score] = []
    first: torch.Tensor | None = None
    texts = held_out(options.text)
    for setting in settings:
        with LLM(
            None if model == "demo" else model,
            threads=options.threads,
            isa=options.isa,
            context_length=options.length + 1,
            enable_prefix_caching=False,
            progress=False,
            **options_of(setting),
        ) as llm:
            prompts = windows(texts, llm.tokenizer, options.tokens, options.length)
            ours = log_probabilities(llm, prompts)
            first = ours if first is None else first
            scores.append(score(setting, llm.stats()["ops"], ours, first))
            print(line(model, scores[-1]), flush=True)
    return scores


def held_out(path: Path | None) -> dict[str, str]:
    """Texts by name: those of the demo model's sources, or one file."""
    if path is not None:
        return {path.name: path.read_text(encoding="utf-8")}
    sources = load_sources(cache_dir() / "bench" / "texts")
    return {source.name: "\n\n".join(source.held_out) for source in sources}


def line(model: str, found: Score) -> str:
    """A score for people."""
    return (
        f"{model:12} {found.setting:9} {found.ops:24} perplexity {found.perplexity:8.4f}  "
        f"{100 * found.change:+.3f} % (± {100 * found.error:.3f})  largest difference {found.largest:.2f} nats"
    )


def main() -> None:
    def names(text: str) -> list[str]:
        return [name for name in text.split(",") if name]

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", type=names, default=["demo", "smollm2", "smollm2-moe"])
    parser.add_argument("--settings", type=names, default=["bfloat16", *QUANTIZATIONS])
    parser.add_argument("--tokens", type=int, default=8192, help="of all windows, about")
    parser.add_argument("--length", type=int, default=512, help="tokens of a window")
    parser.add_argument("--text", type=Path, help="a text file to read instead")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--isa")
    options = parser.parse_args()
    for setting in options.settings:
        if setting not in (*DTYPES, *QUANTIZATIONS):
            parser.error(f"{setting!r} is none of {', '.join((*DTYPES, *QUANTIZATIONS))}")
    results = {model: measure(model, options.settings, options) for model in options.models}
    plain = {model: [asdict(found) for found in scores] for model, scores in results.items()}
    print(json.dumps({"tokens": options.tokens, "length": options.length, "results": plain}))


if __name__ == "__main__":
    main()
