#!/usr/bin/env python3
"""Write docs/benchmarks.md from a run against peers and from what did not help.

usage: benchmarks_page.py [--check]      (needs the package, installed)

The run is docs/benchmarks/results.json, as ``colibri bench --against ... --output`` wrote it. What did not help is
docs/benchmarks/negative_results.md, written by hand: the page's last section. With --check nothing is written; exit 1
if the page is stale.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from pathlib import Path
from typing import Any

from colibri_cli.bench.report import duration
from colibri_cli.formats.files import write_atomically

DOCS = Path(__file__).resolve().parents[1] / "docs"
PAGE, RUN, NEGATIVE = DOCS / "benchmarks.md", DOCS / "benchmarks/results.json", DOCS / "benchmarks/negative_results.md"
OURS = "colibri"

INTRODUCTION = """\
# Benchmarks

<!-- Written by scripts/benchmarks_page.py from benchmarks/results.json and benchmarks/negative_results.md. -->

Colibri beside other libraries that run MoE layers on a CPU, losses included. Milliseconds drift with a machine's clocks
and neighbours; ratios within a row were measured in turns and drift less.
"""
METHOD = """\
## How

One routed MoE layer of SwiGLU experts without bias, whatever else the model adds; random Gaussian weights; each token's
experts and their weights are given, so routing is not part of the work (ONNX Runtime takes logits, and does its own
top-k and softmax, a small part). Every arm gets the same weights, states and routing, packed or converted beforehand.
The states are numbers that bfloat16 holds. With bfloat16 weights, intermediate states are bfloat16 too: Colibri rounds
them once (`intermediate_dtype="bfloat16"`), ggml likewise, PyTorch after every step.

Each arm is a process that imports its own library alone. Its answer is held against float64 first, for each batch and
number of threads; a wrong arm would be reported and not timed. Then the arms take turns, {rounds} rounds at most, one
at a time, each waiting until its threads sleep. A time is the median of the rounds' medians of a call from Python,
garbage collection off and the clock's own cost taken off. The same tokens come again in each call, so small layers stay
in the caches.

- **ahead**: the time of the best rival by Colibri's, the median of the rounds' ratios, so that a slow minute counts on
  both sides. Below 1 the rival is quicker. It may differ from the ratio of the times shown; where the two disagree
  about who is first, call it a tie.
- **spread**: the middle half of the medians of Colibri's rounds, by the time.
- **of peak**: Colibri's share of the multiply-adds that so many threads managed just before or just after its turn, in
  registers or in the first cache; the median of the rounds. int8 and int4 multiply integers, several at once, and may
  pass it.
- **of read**: likewise its share of the rate at which so many threads read memory then: the best of several loops, each
  by the median of its tries; plain ones, and Colibri's own kernels on more weights than the caches hold. Each active
  expert's weights count once; what comes from a cache may pass it.

The same again, on another machine (the extra `peers` installs the others):

```console
$ {command}
```
"""


def page(run: dict[str, Any], negative: str) -> str:
    """Render the page."""
    parts = [
        INTRODUCTION,
        _summary(run),
        METHOD.format(rounds=run["rounds"], command=_command(run)),
        _where(run),
        "## Times\n",
        *(_shape(run, shape) for shape in run["shapes"]),
        negative.strip() + "\n",
    ]
    return "\n".join(parts)


def _command(run: dict[str, Any]) -> str:
    lists = {
        "--against": run["against"],
        "--tokens": dict.fromkeys(case["n_tokens"] for case in run["cases"]),
        "--dtype": dict.fromkeys(case["dtype"] for case in run["cases"]),
        "--threads": [limit["threads"] for limit in run["limits"]],
    }
    words = ["colibri", "bench"]
    for shape in run["shapes"]:
        name, of, n_experts = shape["name"].partition("-of-")
        words += ["--shape", name, *(["--experts", n_experts] if of else [])]
    words += [word for name, values in lists.items() for word in (name, ",".join(map(str, values))) if values]
    return shlex.join([*words, *(["--quick"] if run["quick"] else [])])


def _table(header: list[str], rows: list[list[str]], *, names: int = 1) -> str:
    """Align the first columns left, the others right."""
    rule = ["---"] * names + ["---:"] * (len(header) - names)
    return "".join(f"| {' | '.join(row)} |\n" for row in (header, rule, *rows))


def _summary(run: dict[str, Any]) -> str:
    of_type = {mean["dtype"]: [] for mean in run["means"]}
    for case in run["cases"]:
        of_type.get(case["dtype"], []).extend(c["ahead"] for c in case["contests"] if "ahead" in c)
    rows = [
        [mean["dtype"], f"{mean['ahead']:.2f}", f"{min(found):.2f}", f"{max(found):.2f}", str(len(found))]
        for mean in run["means"]
        for found in [of_type[mean["dtype"]]]
    ]
    table = _table(["weights", "ahead, geometric mean", "least", "most", "cells"], rows)
    lost = [
        f"- {cell['case']}, {_threads(cell['threads'])}: {cell['ahead']:.2f} of {cell['rival']}\n"
        for cell in run["behind"]
    ]
    text = f"Behind in {len(lost)} of these cells:\n\n{''.join(lost)}" if lost else "Behind in none of these cells.\n"
    return f"## In short\n\nHow many times as long as Colibri the best rival takes:\n\n{table}\n{text}"


def _threads(n: int) -> str:
    return f"{n} thread{'s' * (n != 1)}"


def _where(run: dict[str, Any]) -> str:
    found = run["environment"]
    machine = f"{found['cpu']}, {found['logical_cpus']} CPUs, {found['isa']} kernels, Python {found['python']}"
    packages = "".join(f"- {name} {version}\n" for name, version in run["versions"].items())
    rows = [
        [str(limit["threads"]), f"{limit['peak_gflops']:.0f}", f"{limit['read_gb_s']:.1f}"] for limit in run["limits"]
    ]
    limits = _table(["threads", "GFLOP/s", "GB/s read"], rows, names=0)
    return f"## Where\n\n{machine}.\n\n{packages}\nThe best that the machine did during the run:\n\n{limits}"


def _shape(run: dict[str, Any], shape: dict[str, Any]) -> str:
    cases = [case for case in run["cases"] if case["shape"] == shape["name"]]
    sizes = (
        f"hidden {shape['hidden_size']}, intermediate {shape['intermediate_size']}, "
        f"top {shape['top_k']} of {shape['n_experts']}"
    )
    tables = [
        _type([case for case in cases if case["dtype"] == dtype]) for dtype in dict.fromkeys(c["dtype"] for c in cases)
    ]
    return f"### {shape['name']}: {sizes}\n\n" + "\n".join(tables)


def _type(cases: list[dict[str, Any]]) -> str:
    arms = {(case["n_tokens"], arm["threads"], arm["name"]): arm for case in cases for arm in case["arms"]}
    names = dict.fromkeys(name for (_, _, name), arm in arms.items() if arm["status"] != "not run")
    rows = [
        _row(contest, case["n_tokens"], [arms[case["n_tokens"], contest["threads"], name] for name in names])
        for threads in dict.fromkeys(contest["threads"] for contest in cases[0]["contests"])
        for case in cases
        for contest in case["contests"]
        if contest["threads"] == threads
    ]
    heads = ["Colibri" if name == OURS else name for name in names]
    header = ["tokens", "threads", *heads, "ahead", "spread", "of peak", "of read"]
    return f"**{cases[0]['dtype']}**\n\n{_table(header, rows, names=0)}\n{_errors(cases[-1])}{_absences(cases)}"


def _row(contest: dict[str, Any], n_tokens: int, arms: list[dict[str, Any]]) -> list[str]:
    timed = [arm["p50_ns"] for arm in arms if arm["status"] == "timed"]
    times = [_time(arm, best=arm["status"] == "timed" and arm["p50_ns"] == min(timed)) for arm in arms]
    ours = next((arm for arm in arms if arm["ours"] and arm["status"] == "timed"), None)
    shares = ["-"] * 3
    if ours is not None:
        spread = (ours["high_ns"] - ours["low_ns"]) / ours["p50_ns"]
        shares = [f"{share:.0%}" for share in (spread, ours["of_peak"], ours["of_read"])]
    ahead = f"{contest['ahead']:.2f}" if "ahead" in contest else "-"
    return [str(n_tokens), str(contest["threads"]), *times, ahead, *shares]


def _time(arm: dict[str, Any], *, best: bool) -> str:
    if arm["status"] != "timed":
        return str(arm["status"])
    return f"**{duration(arm['p50_ns'])}**" if best else duration(arm["p50_ns"])


def _errors(case: dict[str, Any]) -> str:
    found = {arm["name"]: arm["rms_error"] for arm in case["arms"] if "rms_error" in arm}
    errors = ", ".join(f"{name} {error:.1e}" for name, error in found.items())
    return f"Root-mean-square error against float64, {case['n_tokens']} tokens: {errors}.\n"


def _absences(cases: list[dict[str, Any]]) -> str:
    """Say once a reason why arms have no time."""
    reasons = dict.fromkeys(
        f"{arm['name']}, {arm['status']}: {arm['reason']}"
        for case in cases
        for arm in case["arms"]
        if arm["status"] != "timed"
    )
    return "\n" * bool(reasons) + "".join(f"- {reason}.\n" for reason in reasons)


def main() -> int:
    """Write or check the page; return the exit code."""
    parser = argparse.ArgumentParser(description="Write docs/benchmarks.md from docs/benchmarks/results.json.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if the page is stale")
    checks = parser.parse_args().check
    text = page(json.loads(RUN.read_text("utf-8")), NEGATIVE.read_text("utf-8"))
    if not checks:
        write_atomically(PAGE, text.encode())
        return 0
    if PAGE.is_file() and PAGE.read_text("utf-8") == text:
        return 0
    print(f"{PAGE} is stale: make benchmarks-page", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
