"""What freezekit itself costs: import time, freeze and audit on very large models, audit_step.

Run by ``nox -s bench``. Models are on the meta device: they have structure and no weights.
Figures are medians over several runs, in milliseconds, with the spread beside them.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import nn

import freezekit
from _figures import save_figures

RESULTS = Path(__file__).parent / "results" / "overhead.json"

# In a fresh process: how long `import freezekit` takes once torch is there.
IMPORT_CODE = """
import time, torch
start = time.perf_counter()
{statement}
print(time.perf_counter() - start)
"""


@dataclass(frozen=True, slots=True)
class Timing:
    """Milliseconds of one measured call; ``limit_ms`` is the bound it is held to, if any."""

    name: str
    tensors: int
    median_ms: float
    min_ms: float
    max_ms: float
    limit_ms: float | None

    @property
    def within(self) -> bool:
        """Whether the median keeps to the bound."""
        return self.limit_ms is None or self.median_ms <= self.limit_ms


def summarize(
    name: str, tensors: int, seconds: list[float], limit_ms: float | None = None
) -> Timing:
    """Median, minimum and maximum of some durations, in milliseconds."""
    found = [1000 * value for value in seconds]
    return Timing(name, tensors, statistics.median(found), min(found), max(found), limit_ms)


def time_import(statement: str, runs: int, limit_ms: float | None = None) -> Timing:
    """How much an import adds to ``import torch``, each in a fresh process."""
    command = [sys.executable, "-c", IMPORT_CODE.format(statement=statement)]
    seconds = [
        float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        for _ in range(runs + 1)
    ]
    return summarize(f"{statement} (after torch)", 0, seconds[1:], limit_ms)


def time_calls(call: Callable[[], object], runs: int) -> list[float]:
    """Durations of ``runs`` calls in seconds, after one that is not counted."""
    call()
    seconds = []
    for _ in range(runs):
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return seconds


def llama_70b() -> nn.Module:
    """Llama-3.1-70B's structure on the meta device."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=128_256,
        hidden_size=8192,
        intermediate_size=28_672,
        num_hidden_layers=80,
        num_attention_heads=64,
        num_key_value_heads=8,
    )
    with torch.device("meta"):
        model: nn.Module = LlamaForCausalLM(config)
    return model


def many_tensors(count: int) -> nn.Module:
    """A model of ``count`` parameter tensors in blocks of ten."""
    with torch.device("meta"):
        blocks = [nn.Sequential(*(nn.Linear(1, 1) for _ in range(5))) for _ in range(count // 10)]
    return nn.ModuleDict({"blocks": nn.ModuleList(blocks), "head": nn.Linear(1, 1)})


def bert_step() -> tuple[nn.Module, torch.optim.Optimizer, Callable[[], None]]:
    """BERT-base with a head, AdamW, and one training step: batch 4, length 128."""
    from transformers import BertConfig, BertForSequenceClassification

    model: nn.Module = BertForSequenceClassification(BertConfig()).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    ids = torch.randint(0, 30_000, (4, 128))
    labels = torch.tensor([0, 1, 0, 1])

    def step() -> None:
        optimizer.zero_grad()
        model(input_ids=ids, labels=labels).loss.backward()
        optimizer.step()

    return model, optimizer, step


def measure_step(runs: int) -> list[Timing]:
    """A step of BERT-base by itself, and under audit_step; the bound is 1.5 times the step."""
    model, optimizer, step = bert_step()
    count = len(list(model.parameters()))
    timings = []
    for frozen in (0, 10):
        name = f"{frozen} of 12 layers frozen"
        if frozen:
            # By hand, so that the optimizer keeps what it holds.
            for parameter in model.get_submodule("bert.embeddings").parameters():
                parameter.requires_grad = False
            for layer in model.get_submodule("bert.encoder.layer")[:frozen]:  # type: ignore[index]
                layer.requires_grad_(requires_grad=False)
        alone = summarize(f"BERT-base step, {name}", count, time_calls(step, runs))
        timings.append(alone)
        for kind in ("copy", "hash"):
            reports: list[freezekit.AuditReport] = []

            def audited(kind: str = kind, reports: list[Any] = reports) -> None:
                reports.append(
                    freezekit.audit_step(model, step, optimizer=optimizer, snapshot=kind)  # type: ignore[arg-type]
                )

            seconds = time_calls(audited, runs)
            found = reports[-1].step
            taken = found.snapshot_bytes / 2**20 if found is not None else 0
            limit = 1.5 * alone.median_ms
            label = f"  audit_step, {kind} ({taken:,.0f} MiB kept)"
            timings.append(summarize(label, count, seconds, limit))
    return timings


def measure(runs: int, sizes: list[int]) -> list[Timing]:
    """All timings, with a progress bar."""
    # Public names are imported when they are asked for: the second line is what using them costs.
    timings = [
        time_import("import freezekit", runs, limit_ms=60),
        time_import("from freezekit import freeze, audit", runs),
    ]
    llama = llama_70b()
    patterns = ["model.embed_tokens", "model.layers[:70]"]
    count = len(list(llama.parameters()))
    timings.append(
        summarize(
            "Llama-3.1-70B: freeze + report",
            count,
            time_calls(lambda: str(freezekit.freeze(llama, patterns)), runs),
            limit_ms=50,
        )
    )
    timings.append(
        summarize(
            "Llama-3.1-70B: audit + report",
            count,
            time_calls(lambda: str(freezekit.audit(llama)), runs),
            limit_ms=200,
        )
    )
    optimizer = torch.optim.AdamW([p for p in llama.parameters() if p.requires_grad])
    timings.append(
        summarize(
            "Llama-3.1-70B: audit + optimizer + report",
            count,
            time_calls(lambda: str(freezekit.audit(llama, optimizer=optimizer)), runs),
            limit_ms=200,
        )
    )
    timings += measure_step(max(2, runs // 2))
    for size in track(sizes, "growth", console=Console(stderr=True), transient=True):
        model = many_tensors(size)
        freeze = time_calls(partial(freezekit.freeze, model, "blocks"), max(2, runs // 3))
        timings.append(summarize("freeze", size, freeze))
        audit = time_calls(partial(freezekit.audit, model), max(2, runs // 3))
        limit = 3_000 if size == 100_000 else None
        timings.append(summarize("audit", size, audit, limit))
    return timings


def show(timings: list[Timing]) -> None:
    """Print the timings as a table of at most 100 columns."""
    table = Table(title=f"freezekit {freezekit.__version__}, torch {torch.__version__}")
    table.add_column("what")
    for header in ("tensors", "median ms", "min", "max", "per 1,000 tensors", "bound ms"):
        table.add_column(header, justify="right")
    for timing in timings:
        per = f"{1000 * timing.median_ms / timing.tensors:.1f}" if timing.tensors else ""
        bound = "" if timing.limit_ms is None else f"{timing.limit_ms:g}"
        if not timing.within:
            bound += " MISSED"
        table.add_row(
            timing.name,
            f"{timing.tensors:,}" if timing.tensors else "",
            f"{timing.median_ms:.1f}",
            f"{timing.min_ms:.1f}",
            f"{timing.max_ms:.1f}",
            per,
            bound,
        )
    Console(width=100).print(table)


def main() -> int:
    """Measure, print and save; exit status 1 if a bound is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=9, help="runs per figure (default 9)")
    parser.add_argument(
        "--sizes",
        type=int,
        nargs="+",
        default=[1_000, 10_000, 30_000, 100_000],
        help="numbers of tensors for the growth",
    )
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    timings = measure(arguments.runs, arguments.sizes)
    show(timings)
    rows = [asdict(timing) for timing in timings]
    save_figures(arguments.out, "freezekit.benchmarks.overhead/1", timings=rows)
    return 0 if all(timing.within for timing in timings) else 1


if __name__ == "__main__":
    sys.exit(main())
