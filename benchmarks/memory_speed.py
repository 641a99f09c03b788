"""What an estimate costs: seconds, and memory of this process.

    python benchmarks/memory_speed.py [FILE.csv]

With a table of measured runs (as for ``memory_accuracy.py xmem``) the median over its rows; then
Llama-3.2-3B and Llama-3.1-70B, on the meta device. Estimates are made one after the other in one
process; the first of each kind pays for imports and caches, and is made before the clock starts.
"""

from __future__ import annotations

import argparse
import csv
import logging
import resource
import statistics
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import nn

from _accuracy.xmem import LLAMA_3B, build_row, estimate_built, read_row
from freezekit import estimate_memory

MIB = 1 << 20
console = Console(width=100)

LLAMA_70B = {
    "vocab_size": 128_256,
    "hidden_size": 8192,
    "intermediate_size": 28_672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 128,
}


def resident() -> int:
    """Bytes of this process that are in memory now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def measure_llamas() -> Table:
    """One estimate for each size: bf16, batch 1, 512 tokens, AdamW."""
    table = Table(title="one estimate, three steps, bf16, batch 1 of 512 tokens, AdamW")
    for header in ("model", "seconds", "resident growth", "estimate", "bound"):
        table.add_column(header, justify="left" if header == "model" else "right")
    sizes = (("Llama-3.2-3B", LLAMA_3B, "15 s"), ("Llama-3.1-70B", LLAMA_70B, "90 s, 400 MiB"))
    for name, options, bound in sizes:
        model, inputs = llama(options)
        before, start = resident(), time.perf_counter()
        estimate = estimate_memory(model, inputs)
        seconds, growth = time.perf_counter() - start, resident() - before
        table.add_row(
            name,
            f"{seconds:.1f}",
            f"{growth / MIB:.0f} MiB",
            f"{estimate.peak_reserved / MIB:,.0f} MiB",
            bound,
        )
    return table


def llama(options: dict[str, Any]) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """A model of these sizes without data, and a batch for it."""
    from transformers import LlamaConfig, LlamaForCausalLM

    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**options)).to(torch.bfloat16)
    ids = torch.empty(1, 512, dtype=torch.long, device="meta")
    return model, {"input_ids": ids, "labels": ids}


def measure_rows(path: Path) -> str:
    """The median over a table's rows that can be built here."""
    with path.open(newline="") as file:
        rows = [read_row(record) for record in csv.DictReader(file)]
    seconds, missing = [], 0
    for row in track(rows, "rows", console=Console(stderr=True)):
        try:
            built = build_row(row)
            start = time.perf_counter()
            estimate_built(row, built)
            seconds.append(time.perf_counter() - start)
        except ImportError:
            missing += 1
    left_out = f" ({missing} left out: torchvision is missing)" if missing else ""
    median, slowest = statistics.median(seconds), max(seconds)
    return (
        f"{len(seconds)} rows{left_out}: median {median:.1f} s, "
        f"slowest {slowest:.1f} s (bound of the median: 2 s)"
    )


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("file", type=Path, nargs="?")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    model, inputs = llama({**LLAMA_3B, "num_hidden_layers": 1})
    estimate_memory(model, inputs)
    console.print(measure_llamas())
    if arguments.file is not None:
        console.print(measure_rows(arguments.file))
    return 0


if __name__ == "__main__":
    sys.exit(main())
