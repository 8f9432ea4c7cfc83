"""`ostinato verify` over models and layouts: what passed, how much of it ran, and how long it took.

    python bench/verify_all.py [--models demo smollm2-moe llama …] [--layouts 1,1,1 2,1,2 2,2,2] [--budget 100]
                               [--threads 2] [--out verify.json]

Names of families stand for their tiny checkpoints (tests/oracle/checkpoints.py), made in a temporary directory;
anything else is given to `--model`. A layout is tp,dp,ep; threads are shared out over its ranks. Each verification is a
process of its own, as a user starts it; seconds are those of the whole process. Exits with 1 unless everything passed.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

LAYOUTS = ("1,1,1", "2,1,2", "2,2,2")


def _checkpoints() -> Any:
    path = Path(__file__).parents[1] / "tests" / "oracle" / "checkpoints.py"
    spec = importlib.util.spec_from_file_location("oracle_checkpoints", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def verified(model: str | None, layout: str, budget: float, threads: int, report: Path) -> dict[str, Any]:
    """One run of the command: its exit code, seconds, cells, comparisons and findings."""
    tp, dp, ep = layout.split(",")
    command = [sys.executable, "-m", "ostinato", "verify", "--budget", str(budget), "--json", str(report)]
    command += ["--tp", tp, "--dp", dp, "--ep", ep, "--threads", str(max(threads // int(tp), 1))]
    if model is not None:
        command += ["--model", model]
    report.unlink(missing_ok=True)
    began = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    seconds = time.perf_counter() - began
    if not report.exists():
        said = (done.stderr.strip() or "nothing").splitlines()[-1].removeprefix("ostinato: error: ")
        refused = "cannot be shared out" in said  # a layout that this model's sizes do not allow
        return {
            "code": 0 if refused else done.returncode,
            "seconds": seconds,
            "error": said,
            "refused": refused,
        }
    found = json.loads(report.read_text())
    checks = [check for check in found["checks"] if not check["skipped"]]
    return {
        "code": done.returncode,
        "seconds": seconds,
        "cells": sum(len(check["cells"]) for check in checks),
        "comparisons": sum(cell["checks"] for check in checks for cell in check["cells"]),
        "findings": [f for check in checks for cell in check["cells"] for f in cell["findings"]],
        "skipped": {check["name"]: check["skipped"] for check in found["checks"] if check["skipped"]},
        "reference": next((c["notes"] for c in checks if c["name"] == "reference"), []),
    }


def _row(model: str, layout: str, found: dict[str, Any]) -> str:
    verdict = {0: "passed", 1: "FAILED"}.get(found["code"], f"ended with {found['code']}")
    if "error" in found:
        verdict = "no such layout" if found["refused"] else verdict
        return f"| {model} | {layout} | {verdict}: {found['error']} | | | {found['seconds']:.0f} |"
    findings = len(found["findings"])
    verdict += f", {findings} findings" if findings else ""
    cells, comparisons, seconds = found["cells"], found["comparisons"], found["seconds"]
    return f"| {model} | {layout} | {verdict} | {cells} | {comparisons} | {seconds:.0f} |"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    checkpoints = _checkpoints()
    parser.add_argument("--models", nargs="+", default=["demo", "smollm2-moe", *checkpoints.FAMILIES])
    parser.add_argument("--layouts", nargs="+", default=list(LAYOUTS))
    parser.add_argument("--budget", type=float, default=100.0, help="seconds for cells, of each run")
    parser.add_argument("--threads", type=int, default=2, help="of all ranks together")
    parser.add_argument("--out", type=Path, help="JSON of everything")
    args = parser.parse_args()
    results = []
    print(
        "| model | tp, dp, ep | verdict | cells | comparisons | seconds |\n|---|---|---|---:|---:|---:|",
        flush=True,
    )
    with tempfile.TemporaryDirectory() as directory:
        for model in args.models:
            path: str | None = None if model == "demo" else model
            if model in checkpoints.FAMILIES:
                path = str(checkpoints.build(model, Path(directory) / model))
            for layout in args.layouts:
                found = verified(path, layout, args.budget, args.threads, Path(directory) / "report.json")
                results.append({"model": model, "layout": layout, **found})
                print(_row(model, layout, found), flush=True)
    if args.out is not None:
        args.out.write_text(json.dumps(results, indent=2) + "\n")
    return 0 if all(found["code"] == 0 for found in results) else 1


if __name__ == "__main__":
    sys.exit(main())
