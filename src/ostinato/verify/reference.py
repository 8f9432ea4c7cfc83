"""The check against transformers: the same prompts through both, next tokens and log-probabilities compared.

    rank 0: transformers in fp32 ─▶ for each position the likeliest tokens, and the residual stream of every layer
    every rank: the same prompt in its own deployment ─▶ the largest distance, and where the residual streams part

Not bit for bit: transformers adds in other orders. Knows nothing of cells. Invariant: what cannot be compared is
skipped, with the reason, never passed.
"""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from ostinato.errors import ConfigError
from ostinato.graphs.stream import EagerStream
from ostinato.verify.outcome import Found, Outcome
from ostinato.verify.stage import Stage

if TYPE_CHECKING:
    from ostinato.engine.engine import Engine

PROMPTS = (
    "The capital of France is Paris, and the capital of Italy is",
    "def add(a, b):\n    return a + b\n\ndef multiply(a, b):\n    return",
    "One, two, three, four, five, six, seven,",
    "Dear Sir or Madam,\n\nI am writing to you because",
)
TOP = 20
"""Tokens of a position whose log-probabilities are compared."""


class Prompt(msgspec.Struct, frozen=True):
    """What transformers made of one prompt of T tokens.

    ids [T]; top [T][TOP]: the likeliest next tokens, best first, and their log-probabilities; hidden: fp32 [L - 1, H]
    as bytes, the residual stream behind every layer but the last, at the last position. own: how far transformers in
    the deployment's dtype is from itself in fp32: a router near a tie makes that much of rounding.
    """

    ids: list[int]
    top: list[list[int]]
    logprobs: list[list[float]]
    hidden: bytes
    own: float = 0.0

    def tolerance(self, dtype: torch.dtype) -> float:
        """What a log-probability may be off."""
        return max(TOLERANCES[dtype].logprob, 2 * self.own)


@dataclass(frozen=True, slots=True)
class Tolerance:
    """By dtype. logprob: most that a log-probability may be off. hidden: most of the residual stream, relative."""

    logprob: float
    hidden: float


TOLERANCES: Mapping[torch.dtype, Tolerance] = {
    torch.float32: Tolerance(2e-3, 1e-3),
    torch.float16: Tolerance(0.1, 0.02),
    torch.bfloat16: Tolerance(0.5, 0.1),
}


def ask_transformers(engine: Engine, texts: Sequence[str], longest: int) -> list[Prompt] | str:
    """What transformers says of these texts, each cut to `longest` tokens; or why there is nothing to compare with."""
    if engine.config.quantization:
        return f"{engine.config.quantization} weights are not those that transformers would run"
    try:
        import transformers
    except ImportError:
        return "transformers is not installed"
    beyond = _beyond_longrope(engine)
    if beyond:
        return beyond
    needed = sum(file.stat().st_size for file in engine.directory.glob("*.safetensors")) * 2
    if needed > _free_memory():
        return f"transformers would need {needed >> 20} MiB for it in fp32, and there are {_free_memory() >> 20} MiB"
    model = _load(transformers, engine.directory)
    if isinstance(model, str):
        return model
    prompts = []
    for text in texts:
        ids = engine.tokenizer.encode(text, add_special_tokens=True)[:longest]
        if ids:
            prompts.append(_prompt(model, ids))
    dtype = engine.model_config.dtype
    if dtype is not torch.float32:
        for (
            parameter
        ) in model.parameters():  # not its buffers: rotations stay in fp32, as when it is loaded so
            parameter.data = parameter.data.to(dtype)
        prompts = [msgspec.structs.replace(prompt, own=_distance(model, prompt)) for prompt in prompts]
    del model
    gc.collect()
    return prompts or "no prompt has a token"


def _beyond_longrope(engine: Engine) -> str:
    """Why rotations differ on purpose: ours are one set for a deployment, those of transformers go by the prompt."""
    context = engine.worker.options.context_length
    for layer in engine.model_config.layers:
        rope = layer.rope
        if rope is not None and rope.rope_type == "longrope" and context > rope.original_max_positions:
            return (
                f"its rope type 'longrope' has one set of factors for contexts over {rope.original_max_positions}, "
                f"which context_length {context} asks for, and transformers takes the other one for short prompts"
            )
    return ""


def _load(transformers: Any, directory: Path) -> Any:
    """The model in fp32, or why transformers cannot make it of exactly these weights."""
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    try:
        model, info = transformers.AutoModelForCausalLM.from_pretrained(
            directory, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
        )
    except (ValueError, OSError, KeyError, RuntimeError) as error:
        return f"transformers cannot load it ({' '.join(str(error).split())[:160]})"
    missing = sorted(info["missing_keys"])
    if missing:
        return f"transformers finds no weight for {missing[0]}, so it has no form of this checkpoint"
    return model.eval()


def _prompt(model: Any, ids: list[int]) -> Prompt:
    with torch.no_grad():
        out = model(torch.tensor([ids]), output_hidden_states=True)
    values, top = out.logits[0].float().log_softmax(-1).topk(min(TOP, out.logits.shape[-1]))
    hidden = torch.stack([layer[0, -1].float() for layer in out.hidden_states[1:-1]])
    return Prompt(ids, top.tolist(), values.tolist(), hidden.contiguous().numpy().tobytes())


def _distance(model: Any, prompt: Prompt) -> float:
    with torch.no_grad():
        logits = model(torch.tensor([prompt.ids])).logits[0]
    found = logits.float().log_softmax(-1).gather(1, torch.tensor(prompt.top))
    return float((found - torch.tensor(prompt.logprobs)).abs().max())


def _free_memory() -> int:
    """Bytes that can be had."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return 1 << 62
    found = [int(line.split()[1]) for line in lines if line.startswith("MemAvailable")]
    return (found[0] if found else 1 << 50) << 10


def given_prompts(prompts: Sequence[str], file: Path | None) -> tuple[str, ...]:
    """Texts from options: prompts, then the lines of a file; the bundled ones when there are none."""
    texts = list(prompts)
    if file is not None:
        if not file.is_file():
            raise ConfigError(f"there is no file {file} with prompts; give one prompt a line")
        try:
            found = file.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ConfigError(f"{file} is not UTF-8 (byte {error.start}); convert it") from None
        texts += [line for line in found.splitlines() if line.strip()]
    if any(not text for text in texts):
        raise ConfigError("a prompt is empty; give some text")
    return tuple(texts) or PROMPTS


def compare(stage: Stage, prompt: Prompt) -> tuple[Outcome, float]:
    """This rank's logits for the prompt against those of transformers, and the largest distance."""
    out, model = Outcome(), stage.worker.model
    ids, rows = torch.tensor(prompt.ids), len(prompt.ids)
    with stage.watched(rows):
        played = stage.play("prefill", [(0, 0, rows)], (rows,) * stage.groups, ids=ids)
    found = stage.logits(played.rows).cpu().log_softmax(-1)
    stage.kv.restore(played.batch.out_cache_loc)
    top, want = torch.tensor(prompt.top), torch.tensor(prompt.logprobs)
    tolerance = prompt.tolerance(model.config.dtype)
    off = (found.gather(1, top) - want).abs().amax(1)
    distance = float(off.max())
    sure = want[:, 0] - want[:, 1] > 2 * tolerance if want.shape[1] > 1 else torch.ones(rows).bool()
    other = ((found.argmax(1) != top[:, 0]) & sure).nonzero().flatten().tolist()
    assert played.taps is not None
    device = model.workspace.device
    embedded = torch.zeros(1, model.config.hidden_size, dtype=model.config.dtype, device=device)
    model.embed(ids[-1:].to(device), EagerStream(), embedded)
    layer = _first_apart(
        embedded[0].float().cpu(),
        played.taps.parts[:, rows - 1].float().cpu(),
        prompt,
        TOLERANCES[model.config.dtype].hidden,
    )
    worst = int(off.argmax())
    what = f"log-probabilities are {distance:.3g} away from transformers', at most {tolerance:.2g} passes"
    close = not bool(torch.isnan(off).any()) and distance <= tolerance
    out.that(close, "distance", Found(what, layer, row=worst, max_abs=distance))
    tokens = (int(found[other[0]].argmax()), prompt.top[other[0]][0]) if other else (0, 0)
    what = f"the next token is {tokens[0]}, transformers says {tokens[1]}"
    out.that(not other, "token", Found(what, layer, row=other[0] if other else None))
    out.checks += 2 * (rows - 1)
    return out, distance


def _first_apart(embedded: torch.Tensor, parts: torch.Tensor, prompt: Prompt, tolerance: float) -> int:
    """First layer behind which the residual streams are further apart; the last one when none is."""
    layers = len(parts) // 2
    hidden = torch.frombuffer(bytearray(prompt.hidden), dtype=torch.float32).view(layers - 1, -1)
    stream = embedded.clone()
    for layer in range(layers - 1):
        stream += parts[2 * layer] + parts[2 * layer + 1]
        if not float((stream - hidden[layer]).norm() / hidden[layer].norm()) <= tolerance:
            return layer
    return layers - 1
