"""Sentiment of real sentences on frozen MiniLM: features once, then heads in seconds.

Run by ``nox -s sentiment``, which fetches the sentences and the pretrained weights. It trains

- a GRU on features per token, and a linear layer on their mean, both out of a store;
- the same two on the frozen backbone without a store, as most code does it;
- the whole model, backbone and all;

and prints each one's accuracy on held-out sentences, seconds an epoch, the peak of live memory in
a step, and the sizes of the stores. What to copy from here is ``make_stores`` and ``train_head``.
"""

from __future__ import annotations

import argparse
import copy
import json
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits as cross_entropy
from transformers import BertModel

from _four_combos import data, machine
from _four_combos.live import optimizer_tensors, peak_during, storage_bytes
from _four_combos.model import WEIGHTS_PACKAGE, pretrained
from freezekit import FeatureDataset, FrozenFeatureExtractor, extract_features, unfreeze

RESULTS = Path(__file__).parent / "results" / "sentiment.json"
LAST_LAYER = "encoder.layer.5"
BATCH = 64
Batch = dict[str, Tensor]


# -- heads -------------------------------------------------------------------------------------


class GRUHead(nn.Module):
    """A GRU over the tokens, one logit per sentence: small, as a head on good features may be."""

    def __init__(self, width: int, hidden: int = 32) -> None:
        super().__init__()
        self.rnn = nn.GRU(width, hidden, batch_first=True)
        self.out = nn.Linear(hidden, 1)

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        """Features (batch, length, width) and their mask to logits (batch,)."""
        packed = nn.utils.rnn.pack_padded_sequence(
            tokens, mask.sum(dim=1).cpu(), batch_first=True, enforce_sorted=False
        )
        _, last = self.rnn(packed)
        logits: Tensor = self.out(last[-1])
        return logits.squeeze(1)


class OnTokens(nn.Module):
    """A head on features per token that come out of a store."""

    def __init__(self, head: GRUHead) -> None:
        super().__init__()
        self.head = head

    def forward(self, batch: Batch) -> Tensor:
        """A batch of the store to logits (batch,)."""
        logits: Tensor = self.head(batch[LAST_LAYER].float(), batch["attention_mask"])
        return logits


class OnMean(nn.Module):
    """A linear layer on pooled features that come out of a store."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.out = nn.Linear(width, 1)

    def forward(self, batch: Batch) -> Tensor:
        """A batch of the store to logits (batch,)."""
        logits: Tensor = self.out(batch["features"])
        return logits.squeeze(1)


class OnPooledBackbone(nn.Module):
    """A linear layer behind a frozen backbone that runs, and pools, at every step."""

    def __init__(self, extractor: FrozenFeatureExtractor, width: int) -> None:
        super().__init__()
        self.extractor = extractor
        self.out = nn.Linear(width, 1)

    def forward(self, batch: Batch) -> Tensor:
        """Token ids and their mask to logits (batch,)."""
        ids, mask = batch["input_ids"], batch["attention_mask"]
        logits: Tensor = self.out(self.extractor(input_ids=ids, attention_mask=mask))
        return logits.squeeze(1)


class OnBackbone(nn.Module):
    """The GRU behind a backbone that runs at every step: frozen in an extractor, or to be tuned."""

    def __init__(self, backbone: nn.Module, head: GRUHead) -> None:
        super().__init__()
        self.backbone = backbone
        self.head = head

    def forward(self, batch: Batch) -> Tensor:
        """Token ids and their mask to logits (batch,)."""
        mask = batch["attention_mask"]
        output = self.backbone(input_ids=batch["input_ids"], attention_mask=mask)
        # An extractor gives its layers by name, the model itself its own output.
        tokens = output[LAST_LAYER] if LAST_LAYER in output else output[0]
        logits: Tensor = self.head(tokens, mask)
        return logits


# -- stores ------------------------------------------------------------------------------------


class Stores(NamedTuple):
    """Features of one side of the data: per token, and their mean."""

    tokens: FeatureDataset
    mean: FeatureDataset


def make_stores(bert: BertModel, batches: Sequence[Batch], folder: Path, side: str) -> Stores:
    """Run every sentence through the backbone once for each store, and keep what comes out."""
    preprocessing = {"tokenizer": WEIGHTS_PACKAGE, "max_length": 512}
    tokens = extract_features(
        FrozenFeatureExtractor(bert, LAST_LAYER),
        batches,
        folder / f"{side}-tokens",
        dtype=torch.float16,  # half the size; an overflow would be an error
        preprocessing=preprocessing,
    )
    mean = extract_features(
        FrozenFeatureExtractor(bert, pool="mean"),
        batches,
        folder / f"{side}-mean",
        preprocessing=preprocessing,
    )
    return Stores(tokens, mean)


def encode(examples: Sequence[data.Example], tokenizer: Any, size: int) -> list[Batch]:
    """Batches of sentences of like length, which spares padding, as mappings."""
    found = data.held_out_batches(examples, tokenizer, batch_size=size)
    return [
        {"input_ids": b.input_ids, "attention_mask": b.attention_mask, "labels": b.labels}
        for b in found
    ]


# -- training ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Row:
    """What one way of training gave: accuracies and seconds of its epochs; sizes in bytes."""

    name: str
    correct: tuple[int, ...]
    tested: int
    epoch_seconds: tuple[float, ...]
    step_peak: int
    standing: int
    store: int


def train_head(
    model: nn.Module,
    batches: Callable[[], Iterable[Batch]],
    rates: Sequence[tuple[nn.Module, float]],
    epochs: int,
    test: Callable[[nn.Module], int],
) -> tuple[list[float], list[int], torch.optim.Optimizer]:
    """Train for some epochs; each one's seconds, and how many held-out sentences are right then."""
    optimizer = torch.optim.AdamW(
        [{"params": [*module.parameters()], "lr": rate} for module, rate in rates]
    )
    seconds, correct = [], []
    for _ in range(epochs):
        model.train()
        begun = time.perf_counter()
        for batch in batches():
            step(model, batch, optimizer)
        seconds.append(time.perf_counter() - begun)
        model.eval()
        correct.append(test(model))
    return seconds, correct, optimizer


def step(model: nn.Module, batch: Batch, optimizer: torch.optim.Optimizer) -> None:
    """One step of training."""
    loss = cross_entropy(model(batch), batch["labels"])
    optimizer.zero_grad()
    torch.autograd.backward(loss)
    optimizer.step()


def count_correct(model: nn.Module, batches: Iterable[Batch]) -> int:
    """How many sentences come out right."""
    with torch.no_grad():
        return sum(int(((model(b) > 0) == b["labels"].bool()).sum()) for b in batches)


def shuffled(batches: Sequence[Any], seed: int) -> Callable[[], Iterator[Any]]:
    """The batches in another order at each call."""
    order = random.Random(seed)  # noqa: S311  (not for secrets)

    def draw() -> Iterator[Any]:
        yield from order.sample(batches, len(batches))

    return draw


def same_batches(store: FeatureDataset, seed: int) -> Callable[[], Iterator[Batch]]:
    """The batches of like length that the store was made of, in the order of ``shuffled``."""
    draw = shuffled(range(0, len(store), BATCH), seed)
    return lambda: (store[start : start + BATCH] for start in draw())


# -- the run -----------------------------------------------------------------------------------


@contextmanager
def threads(count: int | None) -> Iterator[None]:
    """So many threads for an operator; ``None``: as many as there were."""
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class Job(NamedTuple):
    """One way of training; ``threads``: for an operator, ``None`` for all."""

    name: str
    make: Callable[[], tuple[nn.Module, list[tuple[nn.Module, float]]]]
    batches: Callable[[], Iterable[Batch]]
    tests: Callable[[], Iterable[Batch]]
    epochs: int
    store: int
    # A head alone computes so little at a time that sharing it out takes longer than it saves.
    threads: int | None = None


def run_job(job: Job, tested: int, seed: int) -> Row:
    """Train, test and measure."""
    torch.manual_seed(seed)
    model, rates = job.make()
    with threads(job.threads):
        seconds, correct, optimizer = train_head(
            model, job.batches, rates, job.epochs, lambda m: count_correct(m, job.tests())
        )
    model.train()
    widest = max(job.batches(), key=lambda b: max(t.numel() for t in b.values()))
    optimizer.zero_grad(set_to_none=True)
    tensors = [*model.parameters(), *model.buffers(), *optimizer_tensors(optimizer)]
    standing = storage_bytes([*tensors, *widest.values()])

    def one_step() -> None:
        step(model, widest, optimizer)
        optimizer.zero_grad(set_to_none=True)

    return Row(
        job.name,
        tuple(correct),
        tested,
        tuple(round(s, 3) for s in seconds),
        peak_during(one_step),
        standing,
        job.store,
    )


def make_jobs(
    bert: BertModel,
    train: tuple[Sequence[Batch], Stores],
    test: tuple[Sequence[Batch], Stores],
    epochs: tuple[int, int, int],
    seed: int,
) -> list[Job]:
    """The ways: linear and GRU, each with a store and without; and all of it tuned.

    With a store or without, a head is given the same batches in the same order.
    """
    width = bert.config.hidden_size
    stored, slow, tuned = epochs
    plain, (token_store, mean_store) = train
    plain_test, (token_test, mean_test) = test

    def on_mean() -> tuple[nn.Module, list[tuple[nn.Module, float]]]:
        model = OnMean(width)
        return model, [(model, 1e-2)]

    def on_tokens() -> tuple[nn.Module, list[tuple[nn.Module, float]]]:
        model = OnTokens(GRUHead(width))
        return model, [(model, 3e-3)]

    def without_store() -> tuple[nn.Module, list[tuple[nn.Module, float]]]:
        model = OnBackbone(FrozenFeatureExtractor(bert, LAST_LAYER), GRUHead(width))
        return model, [(model.head, 3e-3)]

    def all_of_it() -> tuple[nn.Module, list[tuple[nn.Module, float]]]:
        own = copy.deepcopy(FrozenFeatureExtractor(bert)).release()
        unfreeze(own)
        model = OnBackbone(own, GRUHead(width))
        return model, [(model.backbone, 2e-5), (model.head, 3e-3)]

    def mean_without_store() -> tuple[nn.Module, list[tuple[nn.Module, float]]]:
        model = OnPooledBackbone(FrozenFeatureExtractor(bert, pool="mean"), width)
        return model, [(model.out, 1e-2)]

    def to_test(store: FeatureDataset) -> Callable[[], Iterable[Batch]]:
        return lambda: store.loader(256)

    size = token_store.nbytes + token_test.nbytes
    small = mean_store.nbytes + mean_test.nbytes
    tests: Callable[[], Iterable[Batch]] = lambda: plain_test  # noqa: E731
    jobs = [
        Job(
            "linear, store",
            on_mean,
            same_batches(mean_store, seed),
            to_test(mean_test),
            stored,
            small,
            threads=1,
        ),
        Job("linear, no store", mean_without_store, shuffled(plain, seed), tests, slow, 0),
        Job(
            "GRU, store",
            on_tokens,
            same_batches(token_store, seed),
            to_test(token_test),
            stored,
            size,
            threads=1,
        ),
        Job("GRU, no store", without_store, shuffled(plain, seed), tests, slow, 0),
        Job("all fine-tuned", all_of_it, shuffled(plain, seed), tests, tuned, 0),
    ]
    return [job for job in jobs if job.epochs]


def run(arguments: argparse.Namespace, console: Console) -> dict[str, Any]:
    """The whole example; its figures."""
    corpus = data.load(arguments.data_dir)
    bert, tokenizer = pretrained("sdpa")
    texts = {"train": corpus.train[: arguments.texts], "test": corpus.test[: arguments.texts]}
    batches = {side: encode(examples, tokenizer, BATCH) for side, examples in texts.items()}
    with tempfile.TemporaryDirectory(prefix="freezekit-sentiment-") as name:
        folder = arguments.store or Path(name)
        begun = time.perf_counter()
        stores = {side: make_stores(bert, batches[side], folder, side) for side in batches}
        extraction = time.perf_counter() - begun
        console.print(repr(stores["train"].tokens), markup=False, highlight=False)
        jobs = make_jobs(
            bert,
            (batches["train"], stores["train"]),
            (batches["test"], stores["test"]),
            (arguments.epochs, arguments.slow_epochs, arguments.tuned_epochs),
            arguments.seed,
        )
        rows = []
        for job in jobs:
            console.print(f"training: {job.name}", markup=False, highlight=False)
            rows.append(run_job(job, len(texts["test"]), arguments.seed))
    return {
        "schema": "freezekit.examples.sentiment/1",
        "machine": asdict(machine.describe()),
        "versions": machine.versions(),
        "sentences": {side: len(examples) for side, examples in texts.items()},
        "extraction_seconds": round(extraction, 1),
        "rows": [asdict(row) for row in rows],
    }


def show(found: dict[str, Any], console: Console) -> None:
    """Print the figures as a table of at most 100 columns."""
    table = Table(title=f"sentiment of {found['sentences']['test']:,} held-out sentences")
    table.add_column("what learns")
    for header in ("epochs", "accuracy", "after 1", "s an epoch", "peak MiB", "store MiB"):
        table.add_column(header, justify="right")
    for row in found["rows"]:
        peak = (row["step_peak"] + row["standing"]) / 2**20
        table.add_row(
            row["name"],
            str(len(row["correct"])),
            f"{row['correct'][-1] / row['tested']:.1%}",
            f"{row['correct'][0] / row['tested']:.1%}",
            f"{sorted(row['epoch_seconds'])[len(row['epoch_seconds']) // 2]:,.2f}",
            f"{peak:,.0f}",
            f"{row['store'] / 2**20:,.0f}" if row["store"] else "",
        )
    console.print(table)
    console.print(
        f"both stores, {sum(found['sentences'].values()):,} sentences: "
        f"{found['extraction_seconds']:,.0f} s, once"
    )


def main() -> int:
    """Run, print and save."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data-dir", type=Path, required=True, help="where the sentences lie")
    parser.add_argument("--store", type=Path, help="keep the stores here (default: for the run)")
    parser.add_argument("--epochs", type=int, default=5, help="of heads on a store")
    parser.add_argument("--slow-epochs", type=int, default=1, help="of heads without a store")
    parser.add_argument("--tuned-epochs", type=int, default=1, help="of full fine-tuning")
    parser.add_argument("--texts", type=int, help="only so many sentences of each side")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    console = Console(width=100, stderr=False)
    try:
        found = run(arguments, Console(stderr=True))
    except data.InputError as error:
        Console(stderr=True).print(str(error), markup=False)
        return 2
    show(found, console)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
