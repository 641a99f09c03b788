"""The docs page: what stands between its markers is rendered from the results."""

from __future__ import annotations

import re
from collections.abc import Callable

from _four_combos import report
from _four_combos.model import TRAINABLE_FROZEN, TRAINABLE_UNFROZEN
from _four_combos.results import Results, SavedRow, TrainRow

FLOAT32 = 4
ADAM_MOMENTS = 2


def render(page: str, results: Results) -> str:
    """Return ``page`` with each marked block rendered from ``results``.

    Raises:
        ValueError: a block is missing from the page, is there twice, or is unknown.
    """
    found = re.findall(r"<!-- four_combos: (\w+) -->", page)
    if sorted(found) != sorted(BLOCKS):
        message = (
            f"the page must hold the blocks {sorted(BLOCKS)} once each, it holds {sorted(found)}"
        )
        raise ValueError(message)
    return re.sub(
        r"(<!-- four_combos: (\w+) -->\n).*?(<!-- end -->)",
        lambda match: f"{match[1]}\n{BLOCKS[match[2]](results)}\n\n{match[3]}",
        page,
        flags=re.DOTALL,
    )


# -- blocks of prose with figures: only they may name a measured number -----------------------


def _where(results: Results) -> str:
    machine, versions = results.machine, results.versions
    size = "a quick run" if results.quick else "a full run"
    return (
        f"Measured in {size} of {results.seconds:.0f} s: {machine.cpu}, {machine.cores} cores, "
        f"{machine.system}; Python {versions['python']}, torch {versions['torch']}, "
        f"transformers {versions['transformers']}; seed {results.seed}."
    )


def _text(results: Results) -> str:
    data = results.data
    return (
        f"Of {data.rows:,} rated sentences, {data.dropped_neutral} rated exactly 0 and "
        f"{data.dropped_repeated} repeated ones are left out. The hash of a text decides on which "
        f"side of the split it stands: {data.train_texts:,} to train, {data.test_texts:,} to test."
    )


def _storing(results: Results) -> str:
    c, d = _saved(results, "c"), _saved(results, "d")
    return (
        f"In the first table BERT saves {c.backbone_saved_bytes:,} bytes in c, and "
        f"{d.backbone_saved_bytes:,} in d. What c keeps, {report.mib(c.head_saved_bytes)} MiB, is "
        f"the GRU's, and a and b keep the same. The peak of a whole training step in the second "
        f"table: {_peaks(results)}."
    )


def _peaks(results: Results) -> str:
    rows = results.train[: len("abcd")]
    return ", ".join(f"{row.label} {report.mib(row.peak_bytes)} MiB" for row in rows)


def _label(results: Results) -> str:
    b = _saved(results, "b")
    trained = _trained(results, "b")
    return (
        f"In the first table b marks {b.marked_trainable:,} and {b.with_gradient:,} receive a "
        f"gradient; {b.backbone_without_gradient} of BERT's tensors have `grad=None` after "
        f"backward. After the training of the second table, {trained.backbone_tensors_changed} of "
        f"BERT's {trained.backbone_tensors} tensors have changed by a bit. "
        f"As for a, b and c: {report.same_head_words(results)}."
    )


def _gradients(results: Results) -> str:
    settings, d = results.saved_settings, _saved(results, "d")
    weights = d.marked_trainable * FLOAT32
    gradients = d.with_gradient * FLOAT32
    state = ADAM_MOMENTS * gradients
    return (
        f"The model's weights are {report.mib(weights)} MiB, all its gradients "
        f"{report.mib(gradients)} MiB, Adam's two moments {report.mib(state)} MiB: together "
        f"{report.mib(weights + gradients + state)} MiB, whatever the batch. For "
        f"{settings.batch_size} texts of {settings.length} tokens, autograd saves "
        f"{report.mib(d.saved_bytes)} MiB on top of that, and the tutorial's batch is 128 texts. "
        f"(Bytes: {FLOAT32} for each of {d.marked_trainable:,} weights "
        f"and {d.with_gradient:,} gradients.)"
    )


def _time(results: Results) -> str:
    reference, warmup = _trained(results, "a"), results.train_settings.warmup
    factors = {k: report.times(_trained(results, k), reference, warmup) for k in "bcd"}
    return (
        f"In the second table a step of b takes {factors['b']:.2f} times one of a, a step of c "
        f"{factors['c']:.2f} times, a step of d {factors['d']:.2f} times."
    )


def _rate(results: Results) -> str:
    settings = results.train_settings
    frozen, d, small = _trained(results, "a"), _trained(results, "d"), results.train[-1]
    return (
        f"With Adam at {settings.learning_rate:g} for everything, as in the tutorial, d ends at "
        f"{report.percent(d.accuracy)} and the frozen a at {report.percent(frozen.accuracy)}, "
        f"after {settings.batches} batches of {settings.batch_size}. With "
        f"{small.backbone_rate:g} for BERT and the same rate as before for the head, d ends at "
        f"{report.percent(small.accuracy)}. The same label for every text would score "
        f"{report.percent(report.one_label(results))}; an accuracy's standard error is "
        f"{100 * report.standard_error(results):.1f} points."
    )


def _predicted(results: Results) -> str:
    settings = results.predicted_settings
    sentences = []
    for attention in settings.attentions:
        rows = {row.combination: row for row in results.predicted if row.attention == attention}
        same = len({rows[key].peak_reserved_bytes for key in "abc"}) == 1
        sentences.append(
            f"With {attention} attention a, b and c {'are the same' if same else 'DIFFER'}: "
            f"{report.gib(rows['c'].peak_reserved_bytes)} GiB reserved, and d reserves "
            f"{report.gib(rows['d'].peak_reserved_bytes)} GiB; on "
            f"{report.gib(settings.budget_bytes)} GiB the largest batch is "
            f"{rows['c'].largest_batch:,} texts in c and {rows['d'].largest_batch:,} in d."
        )
    return " ".join(sentences)


def _counts(_: Results) -> str:
    return (
        f"`112M` is {TRAINABLE_UNFROZEN:,} and `3M` is {TRAINABLE_FROZEN:,}; the benchmark stops "
        f"with an error when its own model has other counts."
    )


def _saved(results: Results, key: str) -> SavedRow:
    return next(row for row in results.saved if row.combination == key)


def _trained(results: Results, key: str) -> TrainRow:
    return next(row for row in results.train if row.combination == key)


BLOCKS: dict[str, Callable[[Results], str]] = {
    "where": _where,
    "counts": _counts,
    "saved_table": lambda results: report.markdown(report.saved_table(results)),
    "text": _text,
    "train_table": lambda results: report.markdown(report.train_table(results)),
    "cuda_table": lambda results: report.markdown(report.cuda_table(results)),
    "predicted_table": lambda results: report.markdown(report.predicted_table(results)),
    "predicted": _predicted,
    "storing": _storing,
    "label": _label,
    "gradients": _gradients,
    "time": _time,
    "rate": _rate,
}
