"""What a comparison shows: a JSON file for each race, and one table and one plot made of all that are there.

Pure functions of the recorded turns. Invariant: a ratio is taken within one turn, and only turns that count are used;
a case with none shows none.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from limits import Costs, decode_seconds, prefill_seconds
from ostinato.ops.cpu.isa import AVX512_BF16

NAMES = {"llamacpp": "llama.cpp", "transformers": "transformers", "vllm": "vLLM"}
_ORDER = ("moe", "dense", "smollm2", "smollm2-moe", "tiny")
_COLOURS = {  # of a peer's modes in turn
    "ostinato": ("#c2410c",),
    "llamacpp": ("#475569",),
    "transformers": ("#94a3b8", "#b6c2d1"),
    "vllm": ("#0f766e",),
}
_FONT = 'font-family="system-ui, sans-serif" font-size="12" fill="#6b7280"'  # grey: on white and on black
_BAR, _GAP, _LEFT, _SCALE, _WIDTH = 14, 12, 190, 420, 760


@dataclass(frozen=True, slots=True)
class CaseSummary:
    """One row of a table. Speeds are tokens a second by label; ratios are of ostinato to a peer, one per turn.

    Shares of the limit are counted in bf16 bytes; `stored_shares` in the bytes that ostinato stores. memory: bytes a
    second that could be read in each turn.
    """

    name: str
    turns: int
    discarded: int
    speeds: Mapping[str, Sequence[float]]
    ratios: Mapping[str, Sequence[float]]
    shares: Sequence[float]
    stored_shares: Sequence[float]
    memory: Sequence[float]


def turn_line(turn: Mapping[str, Any]) -> str:
    """A turn as a line of progress."""
    speeds = "  ".join(f"{label} {speed:.1f}" for label, speed in turn["tokens_per_second"].items())
    busy = max(turn["cores_of_others"].values())
    memory = min(turn[when]["bytes"] for when in ("ceilings", "ceilings_after") if when in turn) / 1e9
    why = "warm-up" if turn["number"] == 0 else f"discarded: others {busy:.2f}, memory {memory:.0f} GB/s"
    kept = "" if turn["kept"] else f"  ({why})"
    return f"  {turn['number']:2} {turn['case']['name']:24} {speeds}{kept}"


def summarise(record: Mapping[str, Any]) -> list[CaseSummary]:
    """The cases of a race, in the order they were run. Of a peer with several modes, the best one of each turn."""
    peers: dict[str, list[str]] = {}
    for contestant in record["contestants"]:
        peers.setdefault(contestant["peer"], []).append(contestant["label"])
    own = peers.pop("ostinato")[0]
    summaries = []
    for name in dict.fromkeys(turn["case"]["name"] for turn in record["turns"]):
        turns = [turn for turn in record["turns"] if turn["case"]["name"] == name and turn["number"] > 0]
        kept = [turn["tokens_per_second"] for turn in turns if turn["kept"]]
        ratios = {
            peer: [speeds[own] / max(speeds[label] for label in labels) for speeds in kept]
            for peer, labels in peers.items()
        }
        labels = [contestant["label"] for contestant in record["contestants"]]
        speeds = {label: [turn[label] for turn in kept] for label in labels}
        shares, stored_shares = (
            [
                share
                for turn in turns
                if turn["kept"] and (share := _share(record, turn, own, stored)) is not None
            ]
            for stored in (1.0, stored_share(record))
        )
        memory = [_best_ceilings(turn)["bytes"] for turn in turns if turn["kept"]]
        discarded = len(turns) - len(kept)
        summaries.append(
            CaseSummary(name, len(kept), discarded, speeds, ratios, shares, stored_shares, memory)
        )
    return summaries


def stored_share(record: Mapping[str, Any]) -> float:
    """Bytes of ostinato's weights in memory as a share of their bf16 bytes."""
    versions = record["versions"].items()  # by process: engine, then the form of the checkpoint
    return next(
        (float(v.get("weights stored", 1.0)) for name, v in versions if name.split("-")[0] == "ostinato"), 1.0
    )


def _share(record: Mapping[str, Any], turn: Mapping[str, Any], own: str, stored: float) -> float | None:
    """The speed as a share of what the machine could do in that turn; only bf16's limit is known."""
    if record["precision"] != "bf16":
        return None
    costs, case, ceilings = Costs.of(record["config"]), turn["case"], _best_ceilings(turn)
    if case["prefills"]:
        tokens, kept = case["context"], record.get("last_layer_rows")
        least = prefill_seconds(costs, tokens, ceilings, stored, kept=kept)
    else:
        middle = case["context"] + case["warmup"] + case["steps"] / 2
        active = record["active_experts"].get(case["name"])
        step = decode_seconds(costs, case["batch"], middle, active, ceilings, stored)
        if step is None:
            return None
        least, tokens = step, case["batch"]
    return float(turn["tokens_per_second"][own] * least / tokens)


def _best_ceilings(turn: Mapping[str, Any]) -> Mapping[str, float]:
    """The better of what was measured before and after: memory may have become faster in between."""
    before = turn["ceilings"]
    after = turn.get("ceilings_after", before)
    return {name: max(before[name], after[name]) for name in before}


def write_race(record: Mapping[str, Any], directory: Path) -> None:
    """A race's JSON, in place of an older one of the same model, precision, peers, kind of processor, instructions and
    memory rule.
    """
    directory.mkdir(parents=True, exist_ok=True)
    least = record.get("memory_from", 0.0)
    rule = [f"from-{least:.0f}"] if least else []
    name = "-".join(
        [
            record["model"],
            record["precision"],
            *_processor(record),
            *_other_isa(record),
            *rule,
            *_peers(record),
        ]
    )
    path = directory / f"{name}.json"
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def _processor(record: Mapping[str, Any]) -> list[str]:
    """Family and model, which tell kinds of processors of one name apart; nothing where they are not known."""
    family, model, *_ = (*record["machine"].get("family_model_stepping", ()), None, None)
    return [f"family{family}-{model}"] if family and model else []


def _other_isa(record: Mapping[str, Any]) -> list[str]:
    """The instructions of ostinato's kernels, where they are not those that it is at home with."""
    isa = record["versions"].get("ceilings-hf", {}).get("isa", AVX512_BF16)
    return [] if isa == AVX512_BF16 else [isa]


def _peers(record: Mapping[str, Any]) -> list[str]:
    """Who took part beside ostinato; a peer's modes are one."""
    return list(dict.fromkeys(c["peer"] for c in record["contestants"] if c["peer"] != "ostinato"))


def write_summary(directory: Path) -> Path:
    """The table (returned) and the plot of all races in a directory."""
    found = [json.loads(path.read_text()) for path in directory.glob("*.json")]
    records = [record for record in found if "precision" in record]  # other measurements lie there too
    records.sort(
        key=lambda r: (
            _other_isa(r),
            _ORDER.index(r["model"]),
            r["precision"],
            -r.get("memory_from", 0.0),
            -len(_peers(r)),
        )
    )
    table = directory / "compare.md"
    (directory / "compare.svg").write_text(plot(records), encoding="utf-8")
    parts = ["# ostinato beside other engines\n", _INTRODUCTION, "![Speeds of all engines](compare.svg)\n"]
    table.write_text("\n".join(parts + [section(record) for record in records]), encoding="utf-8")
    return table


_INTRODUCTION = """Written by `python bench/compare.py`. Tokens a second, medians over alternated turns; ratios are of
ostinato to a peer (the best of its modes) within a turn: median (least–most). A turn counts when nobody else used the
machine during it; two clock ticks while the ceilings were measured are no use (until 2026-12-01 01:30 they discarded
a turn: seven of the race from 40 GB/s on, which were judged anew). Steps, and a prompt, before the timed ones warm up
(races before 2026-11-30 11:04 timed the first prompt too). The share of the limit is of the least time that reading
the weights and the KV cache once, or the multiply-adds, could take by bandwidth and peak, the better of what was
measured before and after the turn: of plain bf16 weights (which lossless coding may pass), and of the bytes that
ostinato's weights take in memory. The bandwidth is that of the faster of two ways to read (until 2026-11-30 21:45 of
one, which asks ahead; up to 8 % less). A prefill's last layer counts for the row whose logits are wanted (since
2026-11-30 19:00; ostinato computed, and the limit counted, all rows before). That bandwidth is beside them,
least–most: memory has more than one state, and peers that multiply slowly lose less in the slow one. ostinato runs
through its scheduler and sampler, llama.cpp and transformers as bare
greedy loops over their forward pass.
"""


_SHARES = ("share of the limit", "as stored")


def _title(record: Mapping[str, Any]) -> str:
    least = record.get("memory_from", 0.0)
    rule = f", memory at {least:.0f} GB/s or more" if least else ""
    beside = ", ".join(NAMES[peer] for peer in _peers(record))
    where = "".join(f", {isa} alone" for isa in _other_isa(record))
    on = "".join(
        f", {processor.replace('-', ' model ').replace('family', 'family ')}"
        for processor in _processor(record)
    )
    return f"{record['model']}, {record['precision']}{where}, beside {beside}{rule}{on}"


def section(record: Mapping[str, Any]) -> str:
    """A race as Markdown."""
    summaries = summarise(record)
    labels = [contestant["label"] for contestant in record["contestants"]]
    peers = list(summaries[0].ratios) if summaries else []
    header = ["", *labels, *(f"vs {NAMES[peer]}" for peer in peers), *_SHARES, "GB/s", "turns"]
    rows = [header, ["---"] + ["---:"] * (len(header) - 1)]
    for case in summaries:
        speeds = [_median(case.speeds[label], ".1f") for label in labels]
        ratios = [_spread(case.ratios[peer]) for peer in peers]
        both = case.shares, case.stored_shares
        shares = [_median([100 * share for share in one], ".0f", " %") for one in both]
        turns = f"{case.turns}" + (f" (+{case.discarded} discarded)" if case.discarded else "")
        memory = "–".join(f"{edge(case.memory) / 1e9:.0f}" for edge in (min, max)) if case.memory else "–"
        rows.append([case.name, *speeds, *ratios, *shares, memory, turns])
    lines = [
        f"## {_title(record)}\n",
        *("| " + " | ".join(row) + " |" for row in rows),
    ]
    return "\n".join([*lines, "", *_notes(record)]) + "\n"


def _median(values: Sequence[float], form: str, unit: str = "") -> str:
    return format(statistics.median(values), form) + unit if values else "–"


def _spread(values: Sequence[float]) -> str:
    if not values:
        return "–"
    return f"**{statistics.median(values):.2f}** ({min(values):.2f}–{max(values):.2f})"


def _notes(record: Mapping[str, Any]) -> list[str]:
    """Texts, ceilings, versions and machine, as a list."""
    notes = []
    for label in record["texts"][0]["equal"] if record["texts"] else ():
        found = [text["equal"][label] for text in record["texts"]]
        equal = " + ".join(str(entry["tokens"]) for entry in found)
        apart = [f"{entry['margin']:.3f}" for entry in found if entry["margin"] is not None]
        why = f"; where they part, log-probabilities differ by {', '.join(apart)}" if apart else ""
        notes.append(
            f"- Greedy text, {label} beside ostinato, equal tokens: {equal} of {len(found)} × 32{why}"
        )
    ceilings = [_best_ceilings(turn) for turn in record["turns"] if turn["kept"]]
    if ceilings:
        gigabytes = statistics.median(entry["bytes"] for entry in ceilings) / 1e9
        peak = statistics.median(entry["operations"] for entry in ceilings) / 1e9
        notes.append(f"- Measured ceilings: {gigabytes:.1f} GB/s read, {peak:.0f} GFLOP/s bf16")
    if record["active_experts"]:
        counts = ", ".join(f"{case} {count:.1f}" for case, count in record["active_experts"].items())
        notes.append(f"- Different experts a layer in a step: {counts}")
    for process, versions in record["versions"].items():
        notes.append(f"- {process}: " + ", ".join(f"{name} {value}" for name, value in versions.items()))
    where = record["machine"]
    notes.append(
        f"- {record['date']}, {where['processor']} ({' '.join(where['instructions'])}), {where['cpus']} CPUs, "
        f"{where['memory_gib']} GiB, {where['system']}, {record['threads']} threads"
    )
    return notes


def plot(records: Sequence[Mapping[str, Any]]) -> str:
    """Bars of the median speeds, each case scaled to its fastest engine, with a tick for every turn. SVG."""
    parts: list[str] = []
    y = 10
    for record in records:
        colours = _colours(record["contestants"])
        y += 22
        parts.append(_text(10, y, _title(record), 'font-size="14" font-weight="600"'))
        x = 10
        y += 22
        for label, colour in colours.items():
            parts.append(f'<rect x="{x}" y="{y - 10}" width="10" height="10" rx="2" fill="{colour}"/>')
            parts.append(_text(x + 15, y, label))
            x += 30 + 7 * len(label)
        y += _GAP
        for case in summarise(record):
            if case.turns:
                bars, y = _bars(case, colours, y)
                parts += bars
    height = y + 10
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}"'
    head += f' viewBox="0 0 {_WIDTH} {height}" {_FONT}>'
    return "\n".join([head, *parts, "</svg>"]) + "\n"


def _colours(contestants: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """A colour for each label, the same for a peer in every race."""
    left = {peer: iter(colours) for peer, colours in _COLOURS.items()}
    return {contestant["label"]: next(left[contestant["peer"]]) for contestant in contestants}


def _bars(case: CaseSummary, colours: Mapping[str, str], y: int) -> tuple[list[str], int]:
    """A group of bars from `y` on, and where it ends."""
    fastest = max(max(case.speeds[label]) for label in colours)
    middle = y + len(colours) * _BAR // 2 + 4
    parts = [_text(_LEFT - 10, middle, case.name, 'text-anchor="end"')]
    for label, colour in colours.items():
        median = statistics.median(case.speeds[label])
        width = _SCALE * median / fastest
        parts.append(
            f'<rect x="{_LEFT}" y="{y}" width="{width:.1f}" height="{_BAR - 2}" rx="2" fill="{colour}"/>'
        )
        for speed in case.speeds[label]:
            x = _LEFT + _SCALE * speed / fastest
            parts.append(f'<path stroke="#fff" stroke-opacity="0.65" d="M{x:.1f} {y + 3}v{_BAR - 8}"/>')
        parts.append(
            _text(
                _LEFT + round(_SCALE * max(case.speeds[label]) / fastest) + 6, y + 10, f"{median:.1f} tok/s"
            )
        )
        y += _BAR
    return parts, y + _GAP


def _text(x: int, y: int, text: str, attributes: str = "") -> str:
    return f'<text x="{x}" y="{y}" {attributes}>{escape(text)}</text>'
