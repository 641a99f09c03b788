"""The command line: parse, measure or read, show, write."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from rich.console import Console

BENCHMARKS = Path(__file__).resolve().parent.parent
RESULTS = BENCHMARKS / "results" / "four_combos.json"
QUICK_RESULTS = BENCHMARKS / "results" / "four_combos.quick.json"
PAGE = BENCHMARKS.parent / "docs" / "explanation" / "four-combinations.md"
DEFAULT_CAPS = ("11GiB", "24GiB")
SEED = 0
WIDTH = 100

_UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


def parse_size(text: str) -> int:
    """Parse a size such as ``11GiB``, ``512 MiB`` or ``1.5GiB`` into bytes.

    Raises:
        ValueError: no such size.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]iB|B)", text.strip())
    size = round(float(match[1]) * _UNITS[match[2]]) if match else 0
    if size <= 0:
        message = f"{text!r} is no size; write for example 11GiB or 1536MiB"
        raise ValueError(message)
    return size


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        prog="four_combos",
        description="Measure the four combinations of torch.no_grad() and requires_grad.",
    )
    parser.add_argument("--quick", action="store_true", help="small sizes, under two minutes")
    parser.add_argument(
        "--cap",
        dest="caps",
        action="append",
        type=_size_argument,
        metavar="SIZE",
        help="cap of the CUDA device's memory; repeatable (default: 11GiB and 24GiB)",
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help="the JSON file (default: benchmarks/results/four_combos.json, with --quick "
        "four_combos.quick.json); a full run to the default file also renders the docs page",
    )
    parser.add_argument(
        "--data-dir",
        type=Path,
        default=BENCHMARKS / "data",
        metavar="DIR",
        help="where vaderSentiment-3.3.2.tar.gz lies (default: benchmarks/data)",
    )
    parser.add_argument(
        "--docs", action="store_true", help="measure nothing: render the docs page from the JSON"
    )
    parser.add_argument(
        "--predict",
        action="store_true",
        help="measure nothing: estimate what a GPU would take, into the JSON and the docs page",
    )
    return parser.parse_args(arguments)


def _size_argument(text: str) -> int:
    try:
        return parse_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def main(arguments: list[str] | None = None, *, begun: float) -> int:
    """Run the command and return its exit status.

    Args:
        arguments: the command line, by default the process's own.
        begun: ``time.monotonic()`` when the process began, seconds.
    """
    options = parse_arguments(arguments)
    # After parsing, as they import torch: a mistyped option is told at once.
    from rich.console import Console

    from _four_combos.data import InputError

    errors = Console(stderr=True)
    try:
        if options.predict:
            predict_anew(options.out or RESULTS, errors)
        elif options.docs:
            render_page(options.out or RESULTS)
        else:
            measure(options, errors, begun)
    except InputError as error:
        errors.print(f"error: {error}", markup=False, highlight=False, soft_wrap=True)
        return 2
    return 0


def measure(options: argparse.Namespace, errors: Console, begun: float) -> None:
    """Run the benchmark, write its JSON, print its tables."""
    from rich.console import Console

    from _four_combos import report, results, runner

    caps = tuple(options.caps or map(parse_size, DEFAULT_CAPS))
    settings = runner.quick_settings(caps) if options.quick else runner.full_settings(caps)
    found = runner.run(settings, options.data_dir, seed=SEED, console=errors, begun=begun)
    path = options.out or (QUICK_RESULTS if options.quick else RESULTS)
    results.write(found, path)
    out = Console()
    if not out.is_terminal or out.width > WIDTH:
        out.width = WIDTH
    for table in report.tables(found):
        out.print()
        out.print(report.rich_table(table))
    out.print()
    out.print(f"{found.seconds:.0f} s; written to {path}", markup=False, soft_wrap=True)
    if path == RESULTS:
        # The page shows the file's figures, so the two change together.
        render_page(path)


def predict_anew(path: Path, errors: Console) -> None:
    """Replace the predicted part of the JSON file at ``path``, and render the page.

    The other parts are timings, and belong to a quiet machine; these figures are the same on any.

    Raises:
        InputError: there is no such file.
    """
    import dataclasses

    from _four_combos import predicted, results
    from _four_combos.data import InputError
    from _four_combos.progress import open_progress

    if not path.is_file():
        message = f"{path} does not exist: `nox -s four_combos` makes it"
        raise InputError(message)
    found = results.from_json(path.read_text(encoding="utf-8"))
    with open_progress(errors, predicted.total_work(found.predicted_settings)) as progress:
        progress.start("4 predicted")
        rows = predicted.run(found.predicted_settings, progress)
    results.write(dataclasses.replace(found, predicted=rows), path)
    if path == RESULTS:
        render_page(path)


def render_page(path: Path) -> None:
    """Render the docs page anew from the JSON file at ``path``.

    Raises:
        InputError: there is no such file.
    """
    from _four_combos import page, results
    from _four_combos.data import InputError

    if not path.is_file():
        message = f"{path} does not exist: `nox -s four_combos` makes it"
        raise InputError(message)
    found = results.from_json(path.read_text(encoding="utf-8"))
    PAGE.write_text(page.render(PAGE.read_text(encoding="utf-8"), found), encoding="utf-8")
