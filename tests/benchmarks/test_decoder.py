"""The comparison of a traced step with one that was recorded on a GPU."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from _accuracy import decoder
from _traces import FORMAT
from memory_accuracy import run_events

NAME = "wed_train_fp32_s128"


@pytest.fixture(autouse=True)
def _one_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoder, "LAYERS", 1)
    monkeypatch.setattr(decoder, "VOCABULARY", 100)


def record(folder: Path, sizes: list[int], form: str = FORMAT, name: str = NAME) -> Path:
    """A file as of a recording, of allocations of these sizes."""
    path = folder / f"{name}.json.gz"
    events = [["a", 512 * number, size] for number, size in enumerate(sizes)]
    content = {"format": form, "events": events, "expected": {"peak_allocated": 1 << 30}}
    with gzip.open(path, "wt") as file:
        json.dump(content, file)
    return path


def test_each_allocation_counts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A step equals itself; one other size is seen, and is the exit status."""
    sizes = decoder._last_step(decoder._estimate(decoder.WORKLOADS[NAME]))
    found = decoder.compare(record(tmp_path, sizes))
    assert found.exact
    assert found.same == len(sizes) > 100
    assert run_events(tmp_path) == 0
    assert f"{len(sizes):,}" in capsys.readouterr().out

    sizes[50] += 512
    found = decoder.compare(record(tmp_path, sizes))
    assert not found.exact
    assert found.same == len(sizes) - 1
    assert run_events(tmp_path) == 1


def test_other_files_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of another model, of another format, or none at all."""
    with pytest.raises(ValueError, match="expected a trace of wed_inference_amp_s512"):
        decoder.compare(tmp_path / "other.json.gz")
    with pytest.raises(
        ValueError, match=r"train_fp32_s128\.json\.gz: expected the format .* got 'other/1'"
    ):
        decoder.compare(record(tmp_path, [512], "other/1"))
    assert run_events(tmp_path / "nowhere") == 1
    said = " ".join(capsys.readouterr().out.split())
    assert "expected files such as wed_inference_amp_s512.json.gz" in said
