"""What features of a frozen backbone cost: the extractor, and the store on disk.

Run by ``nox -s bench``. What is compared runs in turns, so that a slow minute of the machine hits
both alike; figures are medians. Files go to the system's temporary folder (3.5 GB, ``--samples``
for less), and are deleted.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import BertConfig, BertModel

import freezekit
from _figures import save_figures
from freezekit import FeatureDataset, FrozenFeatureExtractor, extract_features
from freezekit._features.identity import backbone_fingerprint

RESULTS = Path(__file__).parent / "results" / "extraction.json"
WIDTH = 768
BATCH = 250

# In a fresh process: the time to open a store, and how much memory that takes.
OPEN_CODE = """
import sys, time
from freezekit import FeatureDataset
def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096
try:
    before = resident()
except OSError:
    resident = lambda: 0
    before = 0
start = time.perf_counter()
dataset = FeatureDataset(sys.argv[1])
print(time.perf_counter() - start, resident() - before, len(dataset))
"""


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured value, and the bound that it is held to, if any."""

    name: str
    value: float
    unit: str
    at_least: float | None = None
    at_most: float | None = None
    note: str = ""

    @property
    def within(self) -> bool:
        """Whether the value keeps to its bound."""
        above = self.at_least is None or self.value >= self.at_least
        return above and (self.at_most is None or self.value <= self.at_most)


def take_turns(calls: Sequence[Callable[[], object]], runs: int) -> list[list[float]]:
    """Durations in seconds of each call, run in turns after one round that is not counted."""
    seconds: list[list[float]] = [[] for _ in calls]
    for run in range(runs + 1):
        for number, call in enumerate(calls):
            start = time.perf_counter()
            call()
            if run:
                seconds[number].append(time.perf_counter() - start)
    return seconds


# -- the extractor -----------------------------------------------------------------------------


def tokens(batch: int, length: int) -> dict[str, Tensor]:
    """Token ids and a mask without padding."""
    ids = torch.randint(1000, 20_000, (batch, length))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def measure_overhead(bert: BertModel, runs: int) -> list[Figure]:
    """The extractor against a bare call under no_grad, in eval."""
    tiny = nn.Linear(4, 4)
    extractor = FrozenFeatureExtractor(tiny)
    inputs = torch.randn(2, 4)

    def bare_tiny() -> None:
        for _ in range(1000):
            with torch.no_grad():
                tiny(inputs)

    def through_tiny() -> None:
        for _ in range(1000):
            extractor(inputs)

    bare, through = take_turns([bare_tiny, through_tiny], 3 * runs)
    # Thousandths of a second for a thousand calls are millionths for one.
    micros = 1000 * (statistics.median(through) - statistics.median(bare))

    features = FrozenFeatureExtractor(bert)
    batch = tokens(8, 128)

    def bare_bert() -> None:
        with torch.no_grad():
            bert(**batch)

    (seconds,) = take_turns([bare_bert], runs)
    whole = statistics.median(seconds)
    # What is added does not depend on what the forward does: without that, it is not lost in it.
    added = measure_added(features, batch, 3 * runs)
    return [
        Figure("overhead, trivial backbone", micros, "us/call", at_most=30),
        Figure(
            "overhead, BERT-base, batch 8, length 128",
            100 * added / whole,
            "%",
            at_most=1,
            note=f"{1e6 * added:.0f} us on {1000 * whole:.0f} ms",
        ),
    ]


def measure_added(extractor: FrozenFeatureExtractor, batch: dict[str, Tensor], runs: int) -> float:
    """Seconds that the extractor adds to a backbone whose forward returns what it returned."""
    backbone = extractor.backbone
    output = extractor(**batch)
    backbone.forward = lambda **_: output

    def bare() -> None:
        for _ in range(100):
            with torch.no_grad():
                backbone(**batch)

    def through() -> None:
        for _ in range(100):
            extractor(**batch)

    try:
        without, added = take_turns([bare, through], runs)
    finally:
        del backbone.forward
    return (statistics.median(added) - statistics.median(without)) / 100


def measure_early_end(bert: BertModel, runs: int) -> list[Figure]:
    """A forward pass that ends after a third of the layers."""
    name = "encoder.layer.3"
    early, whole = FrozenFeatureExtractor(bert, name), FrozenFeatureExtractor(bert)
    batch = tokens(8, 128)
    early(**batch)
    ended, full = take_turns([lambda: early(**batch), lambda: whole(**batch)], runs)
    ratio = statistics.median(ended) / statistics.median(full)
    return [Figure("time to layer 4 of 12, of a whole forward", 100 * ratio, "%", at_most=45)]


def measure_fingerprint(bert: BertModel, runs: int) -> list[Figure]:
    """The content hash of BERT-base."""
    nbytes = sum(p.nbytes for p in bert.parameters())
    (seconds,) = take_turns([lambda: backbone_fingerprint(bert)], runs)
    rate = nbytes / statistics.median(seconds) / 1e9
    return [Figure("fingerprint of BERT-base", rate, "GB/s", at_least=1)]


# -- the store ---------------------------------------------------------------------------------


class Drawn(nn.Module):
    """A backbone that costs nothing: features that were drawn once, again and again."""

    def __init__(self) -> None:
        super().__init__()
        self.pool: Tensor
        self.register_buffer("pool", torch.randn(16, BATCH, WIDTH))

    def forward(self, numbers: Tensor) -> Tensor:
        """The features of samples with these numbers, which follow each other."""
        return self.pool[int(numbers[0]) // BATCH % 16]


def write_store(folder: Path, samples: int) -> FeatureDataset:
    """A store of pooled features."""
    extractor = FrozenFeatureExtractor(Drawn())
    numbers = torch.arange(samples).split(BATCH)  # type: ignore[no-untyped-call]
    return extract_features(extractor, numbers, folder, progress=False, check=False)


def write_plain(folder: Path, samples: int) -> None:
    """The same bytes by safetensors alone, synced like the store's."""
    folder.mkdir()
    pool = Drawn().pool
    whole = 256 * 2**20 // (4 * WIDTH * BATCH)
    for number, start in enumerate(range(0, samples // BATCH, whole)):
        count = min(whole, samples // BATCH - start)
        rows = torch.cat([pool[i % 16] for i in range(count)])
        path = folder / f"{number}.safetensors"
        save_file({"features": rows}, str(path))
        with path.open("rb+") as file:
            os.fsync(file.fileno())


def measure_writing(folder: Path, samples: int, runs: int) -> list[Figure]:
    """The store's writer against safetensors alone."""
    times: list[list[float]] = [[], []]
    for _ in range(runs):
        for number, write in enumerate((write_store, write_plain)):
            with tempfile.TemporaryDirectory(dir=folder) as beside:
                start = time.perf_counter()
                write(Path(beside) / "store", samples)
                times[number].append(time.perf_counter() - start)
    pairs = [plain / store for store, plain in zip(*times, strict=True)]
    rate = 4 * WIDTH * samples / statistics.median(times[0]) / 1e6
    return [
        Figure(
            "writing, of safetensors alone",
            100 * statistics.median(pairs),
            "%",
            at_least=70,
            note=f"{rate:,.0f} MB/s to disk, checksums made",
        )
    ]


def measure_reading(folder: Path, samples: int, runs: int) -> list[Figure]:
    """Random reading against numpy.memmap of one file."""
    dataset = write_store(folder / "read", samples)
    path = folder / "plain.npy"
    plain = np.lib.format.open_memmap(path, "w+", np.float32, (samples, WIDTH))
    for start in range(0, samples, 1000):
        plain[start : start + 1000] = dataset[start : start + 1000]["features"].numpy()
    plain.flush()
    mapped = np.load(path, mmap_mode="r")
    drawn = random.Random(0)  # noqa: S311  (not for secrets)
    order = [drawn.randrange(samples) for _ in range(16_384)]
    chunks = [order[i : i + 256] for i in range(0, len(order), 256)]
    assert torch.equal(dataset[order[0]]["features"], torch.from_numpy(mapped[order[0]].copy()))

    def store_samples() -> None:
        for index in order:
            dataset[index]

    def plain_samples() -> None:
        for index in order:
            torch.from_numpy(mapped[index].copy())

    def store_batches() -> None:
        for chunk in chunks:
            dataset[chunk]

    def plain_batches() -> None:
        for chunk in chunks:
            torch.from_numpy(mapped[chunk])

    calls = [store_samples, plain_samples, store_batches, plain_batches]
    found = [statistics.median(times) for times in take_turns(calls, runs)]
    rates = [len(order) / seconds for seconds in found]
    return [
        Figure(
            "random samples, of numpy.memmap",
            100 * rates[0] / rates[1],
            "%",
            at_least=70,
            note=f"{rates[0]:,.0f} samples/s",
        ),
        Figure(
            "random batches of 256, of numpy.memmap",
            100 * rates[2] / rates[3],
            "%",
            note=f"{rates[2]:,.0f} samples/s",
        ),
    ]


def measure_opening(folder: Path, samples: int, runs: int) -> list[Figure]:
    """Opening a large store, each time in a fresh process."""
    path = folder / "large"
    dataset = write_store(path, samples)
    command = [sys.executable, "-c", OPEN_CODE, str(path)]
    rows = []
    for _ in range(runs):
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        rows.append([float(value) for value in done.stdout.split()])
    seconds, resident, counted = (statistics.median(column) for column in zip(*rows, strict=True))
    assert counted == len(dataset)
    return [
        Figure(
            f"opening {samples:,} features",
            1000 * seconds,
            "ms",
            at_most=100,
            note=f"{dataset.nbytes / 1e9:.2f} GB on disk, {resident / 1e6:.1f} MB resident more",
        )
    ]


def measure_epoch(bert: BertModel, folder: Path, samples: int) -> list[Figure]:
    """An epoch over the store against one through frozen BERT-base."""
    extractor = FrozenFeatureExtractor(bert, pool="mean")
    batches = [tokens(8, 128) for _ in range(samples // 8)]
    start = time.perf_counter()
    for batch in batches:
        extractor(**batch)
    frozen = time.perf_counter() - start
    dataset = extract_features(extractor, batches, folder / "epoch", progress=False)

    def epoch() -> None:
        for _ in dataset.loader(8, shuffle=True):
            pass

    (seconds,) = take_turns([epoch], 5)
    stored = statistics.median(seconds)
    return [
        Figure(
            "an epoch through BERT-base, of one over the store",
            frozen / stored,
            "times",
            at_least=50,
            note=f"{samples} samples: {frozen:.1f} s and {1000 * stored:.1f} ms",
        )
    ]


# -- all of it ---------------------------------------------------------------------------------


def measure(runs: int, samples: int, console: Console) -> list[Figure]:
    """All figures, in parts that are said as they begin."""
    torch.manual_seed(0)
    bert = BertModel(BertConfig())
    figures: list[Figure] = []
    threads = torch.get_num_threads()
    with tempfile.TemporaryDirectory(prefix="freezekit-bench-") as name:
        folder = Path(name)
        small = min(samples, 200_000)
        parts: list[tuple[str, Callable[[], list[Figure]]]] = [
            ("the extractor's overhead", lambda: measure_overhead(bert, runs)),
            ("the early end", lambda: measure_early_end(bert, runs)),
            ("the fingerprint", lambda: measure_fingerprint(bert, runs)),
            ("writing", lambda: measure_writing(folder, small, 3)),
            ("reading", lambda: measure_reading(folder, small, runs)),
            ("opening", lambda: measure_opening(folder, samples, 5)),
            ("an epoch", lambda: measure_epoch(bert, folder, 64)),
        ]
        for number, (part, run) in enumerate(parts, start=1):
            # Several threads wait for each other on rows of a few kilobytes.
            torch.set_num_threads(1 if part in ("writing", "reading", "opening") else threads)
            console.print(f"[{number} of {len(parts)}] {part}", markup=False, highlight=False)
            figures += run()
    return figures


def show(figures: Sequence[Figure]) -> None:
    """Print the figures as a table of at most 100 columns."""
    table = Table(title=f"freezekit {freezekit.__version__}, torch {torch.__version__}")
    table.add_column("what")
    table.add_column("value", justify="right")
    table.add_column("unit")
    table.add_column("bound")
    table.add_column("besides")
    for figure in figures:
        bound = "" if figure.at_least is None else f"at least {figure.at_least:g}"
        bound = bound if figure.at_most is None else f"at most {figure.at_most:g}"
        if not figure.within:
            bound += " MISSED"
        table.add_row(figure.name, f"{figure.value:,.2f}", figure.unit, bound, figure.note)
    Console(width=100).print(table)


def main() -> int:
    """Measure, print and save; exit status 1 if a bound is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=7, help="runs per figure (default 7)")
    parser.add_argument(
        "--samples", type=int, default=1_000_000, help="size of the store that is opened"
    )
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    figures = measure(arguments.runs, arguments.samples, Console(stderr=True))
    show(figures)
    rows = [asdict(figure) for figure in figures]
    save_figures(arguments.out, "freezekit.benchmarks.extraction/1", figures=rows)
    return 0 if all(figure.within for figure in figures) else 1


if __name__ == "__main__":
    sys.exit(main())
