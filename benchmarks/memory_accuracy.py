"""How near estimate_memory comes to what was measured.

    python benchmarks/memory_accuracy.py cpu
    python benchmarks/memory_accuracy.py transformers [NAME ...]
    python benchmarks/memory_accuracy.py xmem FILE.csv [--family transformer]
    python benchmarks/memory_accuracy.py timm FILE.csv
    python benchmarks/memory_accuracy.py peft FILE.csv
    python benchmarks/memory_accuracy.py events FOLDER

``cpu`` runs the same steps on fake and on real tensors and compares live bytes at every boundary
of a step and at the peak; exit status 1 if a row differs that has no reason why. ``transformers``
does so for a small model of every architecture that the installed release has. The others rebuild
the runs of a table of measurements and print estimate, measurement and error for each: ``xmem``
peaks of torchvision and transformers models, ``timm`` the growth with the batch size, ``peft``
peaks of a Llama of which nearly everything is frozen. ``events`` holds a training step of a decoder
against what was recorded of it on a GPU (the traces of ``allocator_replay.py``), allocation by
allocation.
"""

from __future__ import annotations

import argparse
import csv
import statistics
import sys
import time
import warnings
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import nn

from _accuracy import decoder
from _accuracy.adapters import (
    Experiment,
    begin_training,
    build,
    estimate_experiment,
    fit_length,
    read_experiment,
)
from _accuracy.cpu import CASES, Case, Comparison, compare
from _accuracy.ranks import spearman
from _accuracy.vision import estimate_slope, read_slope
from _accuracy.xmem import Row, build_row, estimate_built, read_row
from _traces import SUFFIX
from freezekit.errors import FreezekitError

MIB = 1 << 20
console = Console(width=110)


def run_cpu() -> int:
    """Compare fake and real runs of every case."""
    table = Table(title="fake trace and real CPU run, bytes")
    for header in ("model", "peak, fake", "peak, real", "boundaries", "events", "seconds", "equal"):
        table.add_column(header, justify="left" if header == "model" else "right")
    results = [
        compare(name, case)
        for name, case in track(CASES.items(), "cases", console=Console(stderr=True))
    ]
    for result in results:
        table.add_row(
            result.name,
            f"{result.fake_peak:,}",
            f"{result.real_peak:,}",
            f"{result.equal_boundaries}/{result.boundaries}",
            f"{result.events:,}",
            f"{result.fake_seconds:.1f}",
            "yes" if result.equal else "no",
        )
    console.print(table)
    for result in results:
        if not result.equal:
            console.print(f"{result.name}: {result.reason or 'NO REASON KNOWN'}", markup=False)
    unexplained = [result for result in results if not result.equal and not result.reason]
    console.print(f"{sum(r.equal for r in results)} of {len(results)} equal to the byte")
    return 1 if unexplained else 0


def _as_is(made: tuple[nn.Module, Any]) -> tuple[nn.Module, Any]:
    return made


def run_transformers(names: Sequence[str]) -> int:
    """Compare fake and real runs of small models of all architectures, or of those named."""
    # (Imports every model's file: only for this command.)
    from _accuracy.zoo import Architecture, architectures, make_small

    transformers.logging.set_verbosity_error()
    chosen: dict[str, Architecture] = {}
    for each in architectures():
        if not names or each.name in names:
            chosen.setdefault(each.name, each)
    results: list[Comparison] = []
    refused = failed = 0
    for each in track(chosen.values(), "architectures", console=Console(stderr=True)):
        torch.manual_seed(0)
        made = make_small(each)
        if made is None:
            refused += 1
            continue
        try:
            results.append(compare(each.name, Case(partial(_as_is, made))))
        except Exception:  # noqa: BLE001  (in the real run: nothing to compare with)
            failed += 1
    for result in results:
        if not result.equal:
            off = 100 * (result.fake_peak / result.real_peak - 1)
            console.print(
                f"{result.name}: peak {off:+.2f} %, {result.equal_boundaries} of "
                f"{result.boundaries} boundaries equal ({result.reason or 'NO REASON KNOWN'})",
                markup=False,
            )
    console.print(
        f"transformers {transformers.__version__}: {sum(r.equal for r in results)} of "
        f"{len(results)} equal to the byte; {refused} are not made small by the usual names "
        f"of sizes, {failed} do not run with a plain batch"
    )
    return 1 if any(not result.equal and not result.reason for result in results) else 0


def run_xmem(path: Path, family: str | None) -> int:
    """Estimate every row, and print errors by family."""
    with path.open(newline="") as file:
        rows = [read_row(record) for record in csv.DictReader(file)]
    rows = [row for row in rows if family in (None, row.family)]
    table = Table(title=f"peak reserved, MiB ({len(rows)} runs)")
    for header in ("run", "measured", "estimate", "error", "safe", "xMem", "DNNMem", "seconds"):
        table.add_column(header, justify="left" if header == "run" else "right")
    errors: list[tuple[Row, float]] = []
    margins: list[tuple[Row, float]] = []
    seconds: list[float] = []
    for row in track(rows, "runs", console=Console(stderr=True)):
        built = build_row(row)
        start = time.perf_counter()
        estimate = estimate_built(row, built)
        seconds.append(time.perf_counter() - start)
        errors.append((row, estimate.peak_reserved / row.measured - 1))
        margins.append((row, estimate.safe / row.measured - 1))
        table.add_row(
            row.run[:48],
            f"{row.measured / MIB:,.0f}",
            f"{estimate.peak_reserved / MIB:,.0f}",
            f"{100 * errors[-1][1]:+.2f} %",
            f"{100 * margins[-1][1]:+.1f} %",
            _error_of(row, row.xmem),
            _error_of(row, row.dnnmem),
            f"{seconds[-1]:.1f}",
        )
    console.print(table)
    _summarize(errors)
    _print_safety(margins)
    console.print(f"seconds an estimate: median {statistics.median(seconds):.1f}")
    return 0


def _error_of(row: Row, estimate: int | None) -> str:
    return "" if estimate is None else f"{100 * (estimate / row.measured - 1):+.2f} %"


def _summarize(errors: list[tuple[Row, float]]) -> None:
    table = Table(title="median relative error")
    for header in ("family", "runs", "freezekit", "xMem", "DNNMem"):
        table.add_column(header, justify="left" if header == "family" else "right")
    for family in ("all", *dict.fromkeys(row.family for row, _ in errors)):
        chosen = [(row, error) for row, error in errors if family in ("all", row.family)]
        columns = [
            [abs(error) for _, error in chosen],
            [abs(row.xmem / row.measured - 1) for row, _ in chosen if row.xmem is not None],
            [abs(row.dnnmem / row.measured - 1) for row, _ in chosen if row.dnnmem is not None],
        ]
        table.add_row(
            family,
            str(len(chosen)),
            *(f"{100 * statistics.median(values):.2f} %" if values else "" for values in columns),
        )
    console.print(table)


def _print_safety(margins: list[tuple[Row, float]]) -> None:
    """How often what to plan with is too little, and how much it is on average."""
    below = sum(margin < 0 for _, margin in margins)
    mean = statistics.fmean(margin for _, margin in margins)
    console.print(
        f"safe: below the measured in {below} of {len(margins)} runs "
        f"({100 * below / len(margins):.1f} %), on average {100 * mean:+.1f} % of it"
    )


def run_timm(path: Path) -> int:
    """Estimate the growth of every model; exit status 1 if one could not be."""
    with path.open(newline="") as file:
        rows = [read_slope(record) for record in csv.DictReader(file)]
    table = Table(title=f"MiB for each image more ({len(rows)} models)")
    for header in ("model", "measured", "estimate", "error", "seconds"):
        table.add_column(header, justify="left" if header == "model" else "right")
    errors: list[float] = []
    failures: list[str] = []
    for row in track(rows, "models", console=Console(stderr=True)):
        start = time.perf_counter()
        try:
            estimate = estimate_slope(row)
        except (ValueError, FreezekitError) as error:
            failures.append(f"{row.model}: {error}")
            continue
        errors.append(abs(estimate / row.measured - 1))
        table.add_row(
            row.model,
            f"{row.measured:.2f}",
            f"{estimate:.2f}",
            f"{100 * (estimate / row.measured - 1):+.1f} %",
            f"{time.perf_counter() - start:.1f}",
        )
    console.print(table)
    _print_spread(errors)
    return _report_failures(failures)


def run_peft(path: Path, skip: Sequence[str] = ()) -> int:
    """Estimate every adapter, at the length of rows that meets the full fine-tune."""
    with path.open(newline="") as file:
        rows = [read_experiment(record) for record in csv.DictReader(file)]
    for row in [row for row in rows if row.peft_type in skip]:
        console.print(f"skipped, as asked: {row.name}", markup=False)
        rows.remove(row)
    full = [row for row in rows if row.peft_type == "FULL"]
    if not full:
        console.print(f"{path}: expected a row of peft_type FULL to fit the length to")
        return 1
    length = fit_length(full[0])
    console.print(f"rows of {length} tokens meet {full[0].name}")
    table = Table(title=f"peak reserved, MiB ({len(rows)} runs)")
    for header in ("experiment", "measured", "estimate", "error", "trainable", "seconds"):
        table.add_column(header, justify="left" if header == "experiment" else "right")
    estimates: list[tuple[Experiment, int]] = []
    failures: list[str] = []
    for row in track(rows, "runs", console=Console(stderr=True)):
        start = time.perf_counter()
        try:
            model = build(row)
            # The comparison counts before its first step.
            found = sum(p.numel() for p in model.parameters() if p.requires_grad)
            optimizer = begin_training(model)
            estimates.append((row, estimate_experiment(model, optimizer, row, length)))
        except (ValueError, FreezekitError) as error:
            failures.append(f"{row.name}: {error}")
            continue
        table.add_row(
            row.name.replace("llama-3.2-3B-", ""),
            f"{row.measured / MIB:,.0f}",
            f"{estimates[-1][1] / MIB:,.0f}",
            f"{100 * (estimates[-1][1] / row.measured - 1):+.2f} %",
            "as measured" if found == row.trainable else f"{found:,} for {row.trainable:,}",
            f"{time.perf_counter() - start:.1f}",
        )
    console.print(table)
    _summarize_adapters(estimates)
    return _report_failures(failures)


def _summarize_adapters(estimates: list[tuple[Experiment, int]]) -> None:
    if len(estimates) > 1:
        pairs = [(row.measured, estimate) for row, estimate in estimates]
        console.print(f"rank correlation (Spearman) {spearman(pairs):.3f}")
    for kind in ("FULL", "LORA"):
        errors = [e / row.measured - 1 for row, e in estimates if row.peft_type == kind]
        if errors:
            console.print(
                f"{kind}: {len(errors)} runs, errors from {100 * min(errors):+.2f} % "
                f"to {100 * max(errors):+.2f} %"
            )
    _print_spread([abs(estimate / row.measured - 1) for row, estimate in estimates])


def run_events(folder: Path) -> int:
    """Compare traced steps with recorded ones, allocation by allocation; 1 unless all are equal."""
    paths = [path for name in decoder.WORKLOADS if (path := folder / f"{name}{SUFFIX}").exists()]
    if not paths:
        console.print(f"{folder}: expected files such as {next(iter(decoder.WORKLOADS))}{SUFFIX}")
        return 1
    found = [decoder.compare(path) for path in track(paths, "traces", console=Console(stderr=True))]
    table = Table(title="allocations of a step on a GPU and of a trace; peaks in MiB")
    for header in (
        "trace",
        "recorded",
        "traced",
        "same, in order",
        "peak, MiB",
        "estimate",
        "error",
    ):
        table.add_column(header, justify="left" if header == "trace" else "right")
    for each in found:
        table.add_row(
            each.name,
            f"{each.recorded:,}",
            f"{each.traced:,}",
            f"{each.same:,}",
            f"{each.measured / MIB:,.1f}",
            f"{each.estimated / MIB:,.1f}",
            f"{100 * (each.estimated / each.measured - 1):+.2f} %",
        )
    console.print(table)
    return 0 if all(each.exact for each in found) else 1


def _print_spread(errors: list[float]) -> None:
    if errors:
        within = sum(error <= 0.1 for error in errors) / len(errors)
        console.print(
            f"median error {100 * statistics.median(errors):.2f} %, "
            f"{100 * within:.0f} % of {len(errors)} within 10 %"
        )


def _report_failures(failures: list[str]) -> int:
    for failure in failures:
        console.print(f"no estimate of {failure}", markup=False)
    return 1 if failures else 0


def main() -> int:
    """Run one of the comparisons."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("cpu", help="the fake trace against real runs on the CPU")
    every = commands.add_parser(
        "transformers", help="the same for small models of all architectures of transformers"
    )
    every.add_argument("names", nargs="*", metavar="NAME", help="such as LlamaForCausalLM")
    xmem = commands.add_parser("xmem", help="a table of peaks measured on GPUs")
    xmem.add_argument("file", type=Path)
    xmem.add_argument("--family", choices=["cnn", "transformer"])
    timm = commands.add_parser("timm", help="a table of device memory by batch size")
    timm.add_argument("file", type=Path)
    peft = commands.add_parser("peft", help="a table of peaks of frozen Llamas with adapters")
    peft.add_argument("file", type=Path)
    peft.add_argument(
        "--skip",
        action="append",
        default=[],
        metavar="TYPE",
        help="leave adapters of this type out (FROD decomposes every weight: many minutes)",
    )
    events = commands.add_parser("events", help="steps recorded on a GPU, by allocation")
    events.add_argument("folder", type=Path)
    arguments = parser.parse_args()
    # The models' own remarks about token ids and checkpoints say nothing about memory.
    warnings.simplefilter("ignore")
    if arguments.command == "cpu":
        return run_cpu()
    if arguments.command == "transformers":
        return run_transformers(arguments.names)
    if arguments.command == "timm":
        return run_timm(arguments.file)
    if arguments.command == "events":
        return run_events(arguments.folder)
    if arguments.command == "peft":
        return run_peft(arguments.file, arguments.skip)
    return run_xmem(arguments.file, arguments.family)


if __name__ == "__main__":
    sys.exit(main())
