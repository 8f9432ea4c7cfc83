"""ostinato beside other engines on the same weights, in alternated rounds on one machine. Linux.

    python bench/compare.py [--peers llamacpp,transformers,vllm] [--models moe,dense,smollm2] [--rounds 5] [--threads 2]

Makes the checkpoints and each peer's virtual environment (once, in the cache directory), loads all engines of a race
side by side, and lets them take turns at each case, so that what the machine does in the meantime hits all of them.
Writes JSON, a table and a plot to bench/results. ostinato is measured through its scheduler and sampler, the peers
llama.cpp and transformers as bare loops over their forward pass, which favours them.

A turn at a case counts only when other processes used less than --others cores while any engine had its turn, and
memory gave at least --memory-from GB/s before and after it (which virtual machines share with neighbours unseen);
otherwise all engines' figures of that turn are discarded, and the turn is repeated. The first turn is a warm-up.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import os
import random
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import machine
import report
from checkpoints import MODELS, Checkpoint, checkpoint
from engines import PEER_TABLE, PeerError, Runner, python_of
from ostinato.config import EngineConfig, cache_dir
from ostinato.text.tokenizer import Tokenizer

ATTEMPTS = 3  # turns tried for each that is wanted
MEMORY_LOOK = 2.0  # seconds between two looks at what memory gives, while it gives too little
MAX_BATCH, MAX_CONTEXT = 32, 640
TIE = 0.25  # log-probabilities nearer than this may be told apart differently by bf16 arithmetic in another order
TEXTS = (
    "The capital of France is",
    "Once upon a time, in a small village by the sea,",
    "def fibonacci(n):\n",
    "Water boils at a temperature of",
)
TEXT_TOKENS = 32
LAST_LAYER_ROWS = (
    1  # of a prompt, that ostinato's last layer computes; records from before it knew which have none
)


@dataclass(frozen=True, slots=True)
class Case:
    """`batch` prompts of `context` tokens; `steps` timed decode steps, or none to time `prefills` prompts instead.

    warmup: steps, or prompts, before those that are timed: the first ones after others had their turn are slower.
    """

    name: str
    batch: int
    context: int
    steps: int
    prefills: int = 0
    warmup: int = 4


CASES = (
    Case("decode b1, context 32", 1, 32, 64),
    Case("decode b1, context 512", 1, 512, 64),
    Case("decode b8", 8, 32, 48),
    Case("decode b32", 32, 32, 32),
    Case("prefill 512", 1, 512, 0, prefills=2, warmup=1),
)


@dataclass(frozen=True, slots=True)
class Contestant:
    """What has a column in a race. Contestants of one `process` share it, and differ in their mode."""

    label: str
    peer: str
    form: str = "hf"
    mode: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def process(self) -> str:
        return f"{self.peer}-{self.form}"


def lineup(precision: str, peers: Sequence[str], *, moe: bool) -> list[Contestant]:
    """Who takes part in a race; ostinato first."""
    if precision == "int8":
        entries = [Contestant("ostinato int8", "ostinato", options={"quantization": "int8"})]
        return entries + [Contestant("llama.cpp q8_0", "llamacpp", "gguf-q8_0")] * ("llamacpp" in peers)
    entries = [Contestant("ostinato", "ostinato")]
    if "llamacpp" in peers:
        entries.append(Contestant("llama.cpp", "llamacpp", "gguf-bf16"))
    if "transformers" in peers:
        modes = ("eager", "grouped_mm") if moe else ("",)
        entries += [Contestant(f"transformers {mode}".strip(), "transformers", mode=mode) for mode in modes]
    if "vllm" in peers:
        entries.append(Contestant("vLLM", "vllm"))
    return entries


class Race:
    """One model in one precision, all contestants loaded. `record` grows by each turn."""

    def __init__(
        self, model: Checkpoint, precision: str, entries: list[Contestant], options: argparse.Namespace
    ) -> None:
        self.model, self.field, self.options = model, entries, options
        self.runners: dict[str, Runner] = {}
        self.record: dict[str, Any] = {
            "model": model.name,
            "precision": precision,
            "config": model.config,
            "contestants": [{"label": c.label, "peer": c.peer} for c in entries],
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "machine": machine.describe(),
            "threads": options.threads,
            "limit_of_others": options.others,
            "memory_from": options.memory_from,
            "last_layer_rows": LAST_LAYER_ROWS,
            "versions": {},
            "active_experts": {},
            "turns": [],
            "texts": [],
        }

    def load(self, stack: ExitStack, cache: Path) -> None:
        """Start all processes, one after the other."""
        for contestant in (Contestant("ceilings", "ceilings"), *self.field):
            if contestant.process in self.runners:
                continue
            peer = PEER_TABLE[contestant.peer]
            python = python_of(peer.environment, cache / "envs")
            log = cache / "logs" / f"{self.model.name}-{contestant.process}.log"
            runner = Runner(contestant.process, peer, python, log, self.options.threads)
            stack.callback(runner.close)
            self.runners[contestant.process] = runner
            self.record["versions"][contestant.process] = runner.load(
                model=str(self.model.path(contestant.form)),
                threads=self.options.threads,
                max_batch=MAX_BATCH,
                max_context=MAX_CONTEXT,
                options=dict(contestant.options),
            )

    def turn(self, case: Case, number: int) -> dict[str, Any]:
        """All contestants at one case, in this order or, every other turn, the reverse."""
        order = self.field if number % 2 == 0 else self.field[::-1]
        prompts = self._prompts(case, number)
        speeds, others = {}, {}
        machine.wait_until_quiet(self.options.others, self.options.patience)
        load = os.getloadavg()
        ceilings = self._ceilings()
        others["ceilings"] = ceilings.others
        for contestant in order:
            machine.wait_until_quiet(self.options.others, self.options.patience)
            speeds[contestant.label], others[contestant.label] = self._measure(contestant, case, prompts)
        after = self.runners["ceilings-hf"].ask("measure").value
        memory = min(ceilings.value["bytes"], after["bytes"])
        kept = number > 0 and max(others.values()) < self.options.others
        kept = kept and memory >= 1e9 * self.options.memory_from
        return {
            "case": dataclasses.asdict(case),
            "number": number,
            "kept": kept,
            "tokens_per_second": speeds,
            "cores_of_others": others,
            "load": load,
            "ceilings": ceilings.value,
            "ceilings_after": after,
        }

    def _ceilings(self) -> Any:
        """What the machine can do now; waits for memory that gives as much as is wanted, as long as patience lasts."""
        end = time.monotonic() + self.options.patience
        while True:
            found = self.runners["ceilings-hf"].ask("measure")
            if found.value["bytes"] >= 1e9 * self.options.memory_from or time.monotonic() > end:
                return found
            time.sleep(MEMORY_LOOK)

    def _prompts(self, case: Case, number: int) -> list[list[int]]:
        """New ones every turn, the same for all engines: nothing is found in a prefix cache."""
        draw = random.Random(f"{case.name} {number}")
        vocabulary = range(3, self.model.config["vocab_size"])
        count = case.warmup + case.prefills if case.prefills else case.batch
        return [draw.choices(vocabulary, k=case.context) for _ in range(count)]

    def _measure(self, contestant: Contestant, case: Case, prompts: list[list[int]]) -> tuple[float, float]:
        runner = self.runners[contestant.process]
        if case.prefills:
            answer = runner.ask("prefill", prompts=prompts, mode=contestant.mode)
            return case.prefills * case.context / sum(answer.value[case.warmup :]), answer.others
        answer = runner.ask(
            "decode", prompts=prompts, warmup=case.warmup, steps=case.steps, mode=contestant.mode
        )
        return answer.value["tokens"] / answer.value["seconds"], answer.others

    def count_experts(self, cases: Sequence[Case]) -> None:
        """How many experts the decode steps of each case read; not timed."""
        runner = self.runners[self.field[0].process]
        for case in cases:
            if case.steps:
                active = runner.ask("experts", prompts=self._prompts(case, 0), steps=case.steps).value
                self.record["active_experts"][case.name] = active

    def compare_texts(self) -> None:
        """Greedy answers to real prompts, each engine's beside ostinato's."""
        tokenizer = Tokenizer.from_dir(self.model.directory)
        runner = self.runners[self.field[0].process]
        for text in TEXTS:
            prompt = tokenizer.encode(text)
            answers = {
                c.label: self.runners[c.process]
                .ask("decode", prompts=[prompt], warmup=0, steps=TEXT_TOKENS - 1, mode=c.mode)
                .value["ids"][0]
                for c in self.field
            }
            expected = answers[self.field[0].label]
            self.record["texts"].append({"prompt": text, "answer": tokenizer.decode(expected), "equal": {}})
            for label, ids in list(answers.items())[1:]:
                equal = next((n for n, (a, b) in enumerate(zip(expected, ids, strict=True)) if a != b), None)
                found = {"tokens": TEXT_TOKENS if equal is None else equal, "margin": None}
                if equal is not None:
                    context = [*prompt, *expected[:equal]]
                    tokens = [expected[equal], ids[equal]]
                    found["margin"] = runner.ask("margin", prompt=context, tokens=tokens).value
                self.record["texts"][-1]["equal"][label] = found


def texts_agree(texts: Sequence[Mapping[str, Any]]) -> bool:
    """Whether all engines answered alike, up to where two tokens were nearly equally likely."""
    found = [entry for text in texts for entry in text["equal"].values()]
    return all(
        entry["tokens"] == TEXT_TOKENS or (entry["margin"] is not None and entry["margin"] < TIE)
        for entry in found
    )


def run(model: Checkpoint, precision: str, options: argparse.Namespace, cache: Path) -> bool:
    """One race from loading to its result files; whether the texts agree."""
    moe = "num_experts_per_tok" in model.config
    race = Race(model, precision, lineup(precision, options.peers, moe=moe), options)
    cases = [dataclasses.replace(case, steps=min(case.steps, options.steps)) for case in CASES]
    print(f"{model.name} {precision}", flush=True)
    with ExitStack() as stack:
        race.load(stack, cache)
        if model.real:
            race.compare_texts()
        if moe and precision == "bf16":
            race.count_experts(cases)
        wanted = {case.name: options.rounds for case in cases}
        for number in range(1 + ATTEMPTS * options.rounds):
            for case in cases:
                if wanted[case.name]:
                    turn = race.turn(case, number)
                    wanted[case.name] -= turn["kept"]
                    race.record["turns"].append(turn)
                    print(report.turn_line(turn), flush=True)
            report.write_race(race.record, options.out)
            if not any(wanted.values()):
                break
    return precision != "bf16" or texts_agree(race.record["texts"])


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    def names(allowed: Sequence[str]) -> Any:
        def split(text: str) -> list[str]:
            chosen = [name for name in text.split(",") if name]
            for name in chosen:
                if name not in allowed:
                    raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(allowed)}")
            return chosen

        return split

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    peers = ("llamacpp", "transformers", "vllm")
    parser.add_argument("--peers", type=names(peers), default=["llamacpp", "transformers"])
    parser.add_argument("--models", type=names(MODELS), default=["moe", "dense", "smollm2", "smollm2-moe"])
    parser.add_argument("--precisions", type=names(("bf16", "int8")), default=["bf16", "int8"])
    parser.add_argument("--rounds", type=int, default=5, help="turns that count, for each case")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--steps", type=int, default=64, help="timed decode steps at most, for a quick look")
    parser.add_argument("--others", type=float, default=0.2, help="cores that others may use")
    parser.add_argument("--memory-from", type=float, default=0.0, help="GB/s that memory must give")
    parser.add_argument("--patience", type=float, default=60.0, help="seconds to wait for such a machine")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    return parser.parse_args(arguments)


def main() -> int:
    options = parse()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    cache = cache_dir() / "bench"
    quantizes = "quantization" in {spec.name for spec in dataclasses.fields(EngineConfig)}
    agree = True
    for name in options.models:
        model = checkpoint(name, cache / "checkpoints", cache_dir())
        for precision in options.precisions:
            if precision == "int8" and not quantizes:
                print("this version of ostinato has no int8; left out", flush=True)
                continue
            try:
                agree &= run(model, precision, options, cache)
            except PeerError as error:
                print(error, file=sys.stderr)
                return 1
    print(f"written to {report.write_summary(options.out)}")
    if not agree:
        print("greedy texts differ by more than rounding; see the table", file=sys.stderr)
    return 0 if agree else 1


if __name__ == "__main__":
    sys.exit(main())
