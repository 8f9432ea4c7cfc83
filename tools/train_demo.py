"""Train, evaluate and export the bundled demo model: `python tools/train_demo.py --minutes 45`.

Fetches the texts (demo_corpus), trains a byte-level BPE and the mixture of experts (demo_trainer), and writes
the Hugging Face layout with a model card (demo_export). The schedule follows the time budget, so a slower
machine trains on fewer tokens; the random seed fixes the rest. A checkpoint is kept under the work directory;
`--resume` goes on from it and `--export-only` exports it as it is.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor

from demo_corpus import Source, load_sources
from demo_export import export
from demo_trainer import Model, Muon, Shape

BOS, EOS = "<|begin|>", "<|end|>"
BOS_ID, EOS_ID = 0, 1
TOKENS_PER_STEP = 4096
PEAK_RATE = 4e-3
BALANCE_WEIGHT = 0.01
SEED = 20


@dataclass(frozen=True, slots=True)
class Stream:
    """A source as tokens: documents end to end, each between BOS and EOS; `starts` follow a line end."""

    name: str
    weight: float
    tokens: np.ndarray
    starts: np.ndarray


def train_tokenizer(sources: list[Source], vocab: int) -> Tokenizer:
    """A byte-level BPE of `vocab` entries; Austen counts fully, a quarter of the other sources does."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=[BOS, EOS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    texts = [text for rank, s in enumerate(sources) for text in (s.train if rank == 0 else s.train[::4])]
    tokenizer.train_from_iterator(texts, trainer)
    template = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, BOS_ID)])
    tokenizer.post_processor = template
    assert tokenizer.token_to_id(BOS) == BOS_ID
    assert tokenizer.token_to_id(EOS) == EOS_ID
    return tokenizer


def to_stream(name: str, weight: float, texts: list[str], tokenizer: Tokenizer) -> Stream:
    """Encode documents; the post-processor puts BOS before each, EOS is added here."""
    parts = [[*encoding.ids, EOS_ID] for encoding in tokenizer.encode_batch(texts)]
    tokens = np.concatenate([np.asarray(part, dtype=np.int32) for part in parts])
    line_end = tokenizer.token_to_id("Ċ")
    before = np.isin(tokens[:-1], [line_end, BOS_ID])
    starts = np.flatnonzero(before & (tokens[1:] != line_end)) + 1
    return Stream(name, weight, tokens, starts)


def sample_windows(
    streams: list[Stream], rows: int, length: int, rng: np.random.Generator
) -> tuple[Tensor, Tensor]:
    """Inputs and targets [rows, length]: BOS, then text from a line start (3 of 4 times) or from anywhere."""
    windows = np.empty((rows, length + 1), dtype=np.int64)
    windows[:, 0] = BOS_ID
    for row, pick in enumerate(rng.choice(len(streams), size=rows, p=[s.weight for s in streams])):
        stream = streams[pick]
        last = len(stream.tokens) - length
        starts = stream.starts[: np.searchsorted(stream.starts, last)]
        at = rng.choice(starts) if rng.random() < 0.75 else rng.integers(last)
        windows[row, 1:] = stream.tokens[at : at + length]
    return torch.from_numpy(windows[:, :-1].copy()), torch.from_numpy(windows[:, 1:].copy())


@torch.no_grad()
def evaluate(model: Model, stream: Stream, byte_count: int, length: int = 512) -> dict[str, object]:
    """Held-out loss in disjoint windows, each after a BOS; also the tokens that each expert got."""
    usable = len(stream.tokens) // length * length
    targets = torch.from_numpy(stream.tokens[:usable].astype(np.int64)).view(-1, length)
    inputs = torch.cat([torch.full_like(targets[:, :1], BOS_ID), targets[:, :-1]], 1)
    nats, counts = 0.0, torch.zeros(model.shape.layers, model.shape.experts, dtype=torch.long)
    for ids, goals in zip(inputs.split(8), targets.split(8), strict=True):
        loss, _, used = model(ids, goals)
        nats += loss.item()
        counts += used
    per_token = nats / usable
    share = usable / len(stream.tokens)
    return {
        "tokens": usable,
        "nats_per_token": per_token,
        "bits_per_byte": nats / np.log(2) / (byte_count * share),
        "expert_tokens": counts.tolist(),
    }


@torch.no_grad()
def probe(model: Model, stream: Stream, length: int = 512) -> dict[str, object]:
    """One held-out window and its loss, for a second implementation to agree with."""
    ids = torch.from_numpy(stream.tokens[None, :length].astype(np.int64))
    loss, _, _ = model(ids[:, :-1], ids[:, 1:])
    return {"ids": ids.tolist(), "nats_per_token": loss.item() / (length - 1)}


def window_of(progress: float) -> int:
    """Tokens in a window: short ones first, then longer contexts, which cost more and need less training."""
    return 256 if progress < 0.72 else 512 if progress < 0.92 else 1024


def rate_of(progress: float) -> float:
    """Warm-up over 2 % of the budget, then linear to zero."""
    return PEAK_RATE * min(progress / 0.02, (1 - progress) / 0.98)


@dataclass(slots=True)
class Progress:
    """What a checkpoint must remember besides the weights."""

    seconds: float = 0.0
    steps: int = 0
    tokens: int = 0


def train(model: Model, streams: list[Stream], checkpoint: Path, budget: float, resume: bool) -> Progress:
    """Train until `budget` seconds are used; raises FloatingPointError when the loss is no longer finite."""
    optimiser, done = Muon(model), Progress()
    if resume:
        state = torch.load(checkpoint, weights_only=True)
        model.load_state_dict(state["model"])
        optimiser.load_state_dict(state["optimiser"])
        done = Progress(**state["progress"])
    rng = np.random.default_rng(SEED + done.steps)
    clock, saved, loss_average = time.monotonic(), time.monotonic(), float("nan")
    while (progress := done.seconds / budget) < 1:
        length = window_of(progress)
        inputs, targets = sample_windows(streams, TOKENS_PER_STEP // length, length, rng)
        loss, balance, counts = model(inputs, targets)
        loss = loss / inputs.numel()
        (loss + BALANCE_WEIGHT * balance).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step(rate_of(progress))
        value = loss.item()
        if not np.isfinite(value):
            raise FloatingPointError(f"loss {value} at step {done.steps}; see {checkpoint.name}")
        loss_average = value if np.isnan(loss_average) else 0.98 * loss_average + 0.02 * value
        now = time.monotonic()
        done = Progress(done.seconds + now - clock, done.steps + 1, done.tokens + inputs.numel())
        clock = now
        if done.steps % 25 == 0:
            least = (counts.min(1).values * model.shape.experts / counts.sum(1)).min().item()
            print(
                f"{done.seconds / 60:6.1f} min  step {done.steps:5d}  window {length:4d}  "
                f"loss {loss_average:.4f}  least used expert {least:.2f} of its share  "
                f"{done.tokens / done.seconds:.0f} tokens/s",
                flush=True,
            )
        if now - saved > 180:
            saved = now
            save(model, optimiser, done, checkpoint)
    save(model, optimiser, done, checkpoint)
    return done


def save(model: Model, optimiser: Muon, done: Progress, checkpoint: Path) -> None:
    """Write the checkpoint beside its final name first, so that it is never half a file."""
    progress = {"seconds": done.seconds, "steps": done.steps, "tokens": done.tokens}
    state = {"model": model.state_dict(), "optimiser": optimiser.state_dict(), "progress": progress}
    partial = checkpoint.with_suffix(".partial")
    torch.save(state, partial)
    partial.replace(checkpoint)


def prepare(work_dir: Path) -> tuple[Tokenizer, list[Stream], list[tuple[Stream, int]]]:
    """Tokenizer (trained once), training streams, and held-out streams with their size in bytes."""
    sources = load_sources(work_dir / "corpus")
    path = work_dir / "tokenizer.json"
    if not path.exists():
        train_tokenizer(sources, Shape().vocab).save(str(path))
    tokenizer = Tokenizer.from_file(str(path))
    streams = [to_stream(s.name, s.weight, s.train, tokenizer) for s in sources]
    held_out = [
        (to_stream(s.name, s.weight, s.held_out, tokenizer), sum(len(t.encode()) for t in s.held_out))
        for s in sources
    ]
    return tokenizer, streams, held_out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--minutes", type=float, default=45.0, help="training time budget")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--work-dir", type=Path, default=Path("build/demo"))
    parser.add_argument("--out", type=Path, default=Path("src/ostinato/demo"))
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint")
    parser.add_argument("--export-only", action="store_true", help="export the checkpoint as it is")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(SEED)
    tokenizer, streams, held_out = prepare(options.work_dir)
    for stream in streams:
        print(f"{stream.name}: {len(stream.tokens)} training tokens", flush=True)
    model, checkpoint = Model(Shape()), options.work_dir / "checkpoint.pt"
    if not options.export_only:
        train(model, streams, checkpoint, options.minutes * 60, options.resume)
    state = torch.load(checkpoint, weights_only=True)
    model.load_state_dict(state["model"])
    model.bfloat16().float()  # evaluate what is shipped: weights rounded to bf16
    report = {
        "progress": state["progress"],
        "train_tokens": {stream.name: len(stream.tokens) for stream in streams},
        "held_out": {stream.name: evaluate(model, stream, size) for stream, size in held_out},
        "probe": probe(model, held_out[0][0]),
    }
    (options.work_dir / "report.json").write_text(json.dumps(report, indent=1))
    export(model, tokenizer, report, options.out)


if __name__ == "__main__":
    main()
