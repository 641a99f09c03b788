"""The command line: options, errors, where the results go, and progress."""

from __future__ import annotations

import dataclasses
import io
import time
from pathlib import Path

import pytest
from rich.console import Console

from _four_combos import cli, data, machine, predicted, report, results, runner, saved
from _four_combos.data import Example, split
from _four_combos.progress import open_progress
from _four_combos.results import (
    CudaSettings,
    PredictedSettings,
    Results,
    SavedSettings,
    TrainSettings,
)
from benchmarks.four_combos_support import MakeTiny, WordTokenizer, some_results


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("11GiB", 11 * 2**30),
        ("24 GiB", 24 * 2**30),
        ("1.5GiB", 3 * 2**29),
        ("512MiB", 2**29),
        ("64KiB", 2**16),
        ("7B", 7),
    ],
)
def test_sizes(text: str, size: int) -> None:
    assert cli.parse_size(text) == size


@pytest.mark.parametrize("text", ["", "11", "11GB", "GiB", "-1GiB", "0GiB", "1e3MiB", "11gib"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is no size; write for example 11GiB"):
        cli.parse_size(text)


def test_caps_repeat() -> None:
    assert cli.parse_arguments(["--cap", "1GiB", "--cap", "2GiB"]).caps == [2**30, 2**31]


def test_a_bad_cap_ends_with_the_reason(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        cli.main(["--cap", "11GB"], begun=0.0)
    assert "'11GB' is no size; write for example 11GiB" in capsys.readouterr().err


def test_missing_data_ends_with_the_command_that_brings_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["--data-dir", str(tmp_path)], begun=0.0) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ")
    assert "`nox -s four_combos` fetches it" in captured.err
    assert captured.out == ""


def test_docs_without_results_ends_with_the_command_that_makes_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["--docs", "--out", str(tmp_path / "none.json")], begun=0.0) == 2
    assert "does not exist: `nox -s four_combos` makes it" in capsys.readouterr().err


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put the default files into a fresh directory, with the real page beside them."""
    (tmp_path / "page.md").write_text(cli.PAGE.read_text(encoding="utf-8"), encoding="utf-8")
    monkeypatch.setattr(cli, "PAGE", tmp_path / "page.md")
    monkeypatch.setattr(cli, "RESULTS", tmp_path / "full.json")
    monkeypatch.setattr(cli, "QUICK_RESULTS", tmp_path / "quick.json")
    return tmp_path


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[runner.Settings]:
    """Stand in for the measuring, and keep the settings that it was given."""
    given: list[runner.Settings] = []

    def run(settings: runner.Settings, *_: object, **__: object) -> Results:
        given.append(settings)
        return some_results(quick=settings.quick)

    monkeypatch.setattr(runner, "run", run)
    return given


def test_a_full_run_writes_its_json_and_the_page(
    places: Path, asked: list[runner.Settings], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([], begun=time.monotonic()) == 0
    assert results.from_json((places / "full.json").read_text()) == some_results()
    assert "Some CPU" in (places / "page.md").read_text()
    assert asked[0].cuda.caps == (11 * 2**30, 24 * 2**30)
    out = capsys.readouterr().out
    assert "1. The tutorial's model" in out
    assert "12 s; written to" in out


def test_a_quick_run_leaves_the_full_runs_results_and_the_page(
    places: Path, asked: list[runner.Settings]
) -> None:
    assert cli.main(["--quick", "--cap", "1GiB"], begun=time.monotonic()) == 0
    assert results.from_json((places / "quick.json").read_text()).quick
    assert not (places / "full.json").exists()
    assert "Some CPU" not in (places / "page.md").read_text()
    assert asked == [runner.quick_settings((2**30,))]


def test_out_names_the_file_and_docs_renders_it(places: Path, asked: list[runner.Settings]) -> None:
    there = str(places / "there.json")
    assert cli.main(["--out", there], begun=time.monotonic()) == 0
    assert "Some CPU" not in (places / "page.md").read_text()
    assert cli.main(["--out", there, "--docs"], begun=time.monotonic()) == 0
    assert "Some CPU" in (places / "page.md").read_text()
    assert len(asked) == 1


def test_predicting_anew_leaves_what_was_measured(
    places: Path, asked: list[runner.Settings], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Timings belong to a quiet machine; estimates are the same on any."""
    assert cli.main([], begun=time.monotonic()) == 0

    rows = tuple(dataclasses.replace(each, largest_batch=4321) for each in some_results().predicted)
    monkeypatch.setattr(predicted, "run", lambda settings, progress: rows)
    assert cli.main(["--predict"], begun=time.monotonic()) == 0
    found = results.from_json((places / "full.json").read_text())
    assert found == some_results(predicted=rows)
    assert "4,321 texts in c" in (places / "page.md").read_text()
    assert len(asked) == 1


def test_all_parts_run_in_order_and_fit_together(
    monkeypatch: pytest.MonkeyPatch, make_tiny: MakeTiny, tmp_path: Path
) -> None:
    """The whole command on a tiny BERT, from the corpus to the JSON."""
    corpus = split([Example(f"good film {n}", positive=n % 2 == 0) for n in range(60)], 1)
    monkeypatch.setattr(data, "load", lambda directory: corpus)
    monkeypatch.setattr(runner, "pretrained", lambda attention: (make_tiny().bert, WordTokenizer()))
    monkeypatch.setattr(saved, "tutorial_model", make_tiny)
    monkeypatch.setattr(predicted, "tutorial_model", make_tiny)
    monkeypatch.setattr(saved, "check_tutorial_counts", lambda marked, requires_grad: None)
    monkeypatch.setattr(machine, "versions", lambda: {"torch": "0"})
    settings = runner.Settings(
        quick=True,
        saved=SavedSettings(batch_size=1, length=5),
        train=TrainSettings(batch_size=2, batches=4, test_texts=5),
        cuda=CudaSettings(caps=(2**30,)),
        predicted=PredictedSettings(batch_size=2, length=5, attentions=("eager",)),
    )
    console = Console(file=io.StringIO(), force_terminal=False, width=100)
    found = runner.run(settings, tmp_path, seed=3, console=console, begun=time.monotonic())
    assert results.from_json(results.to_json(found)) == found
    assert (found.seed, found.quick, len(found.saved), len(found.train)) == (3, True, 8, 5)
    assert found.cuda is None
    assert [row.combination for row in found.predicted] == list("abcd")
    assert report.same_head(found)
    assert found.data.tested_positive == sum(e.positive for e in corpus.test[:5])
    assert (found.data.rows, found.data.dropped_neutral) == (61, 1)
    assert 0 < found.seconds < 60
    assert isinstance(console.file, io.StringIO)
    assert "100%]" in console.file.getvalue()


def test_progress_is_plain_lines_where_nobody_watches() -> None:
    console = Console(file=io.StringIO(), force_terminal=False, width=100)
    with open_progress(console, 10.0) as progress:
        progress.start("1 part")
        for number in range(20):
            progress.advance(0.5, f"[{number}]")
    assert isinstance(console.file, io.StringIO)
    lines = console.file.getvalue().splitlines()
    assert lines[0].endswith("0%] 1 part")
    assert lines[-1].endswith("100%] [19] done")
    assert len(lines) == 11


def test_progress_is_a_bar_on_a_terminal() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=100)
    with open_progress(console, 10.0) as progress:
        progress.start("1 part")
        progress.advance(5.0, "note")
    assert isinstance(console.file, io.StringIO)
    assert "50 %" in console.file.getvalue()


def test_the_machine_is_described_without_naming_it() -> None:
    described = machine.describe()
    assert described.cores >= 1
    assert described.threads >= 1
    assert described.cpu
    assert described.system.count(",") == 1
