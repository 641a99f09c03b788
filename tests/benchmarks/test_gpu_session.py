"""The session on a GPU, without one: what it would run, its records, and how it ends."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import gpu_session
from _gpu_session import compare, records
from _gpu_session.build import build
from _gpu_session.configs import CONFIGS, Config
from _gpu_session.cuda import reduce_snapshot
from _gpu_session.run import CpuDevice, attention_kernels, run

H200 = gpu_session.RESULTS / "records.jsonl"
MEASURED = [record for record in records.read(H200) if record["outcome"] == "ran"]
MODELS = [config for config in CONFIGS if config.part == "model"]


def sample() -> list[Config]:
    """Every model, and every value of every setting, at least once."""
    chosen: list[Config] = []
    seen: set[tuple[str, object]] = set()
    for config in CONFIGS:
        settings = {
            (name, getattr(config, name))
            for name in ("part", "model", "frozen", "optimizer", "precision", "attention")
        } | {("checkpointed", config.checkpointed), ("combination", config.combination)}
        if not settings <= seen:
            chosen.append(config)
            seen |= settings
    return chosen


def test_what_a_session_runs() -> None:
    """The question first, then some sixty trainings, then times; each once."""
    keys = [config.key for config in CONFIGS]
    assert len(set(keys)) == len(keys)
    parts = [config.part for config in CONFIGS]
    assert parts == sorted(parts, key=["four", "model", "time"].index)
    assert parts.count("four") == 2 * 2 * 3 * 4
    assert 60 <= parts.count("model") <= 70
    assert sum(config.snapshot for config in CONFIGS) == 10


@pytest.mark.parametrize("config", sample(), ids=lambda config: config.key)
def test_a_dry_run_goes_through(config: Config) -> None:
    """At reduced size on the CPU each kind of configuration runs, and its estimate is made."""
    found, events = run(config, CpuDevice(), small=True)
    assert (found["outcome"], found["error"], events) == ("ran", "", None)
    assert found["max_reserved"] is None
    if config.model == "extractor":
        assert found["bare_seconds"] > 0 < found["extractor_seconds"]
    else:
        assert len(found["step_seconds"]) >= 3
    if config.part != "time":
        predicted = gpu_session.estimate(config, small=True)
        assert 0 < predicted["allocated"] <= predicted["reserved"] <= predicted["safe"]


def test_full_size_estimates() -> None:
    """D does not fit under 11 GiB at the tutorial's size, c does."""
    fits = {
        config.combination: gpu_session.estimate(config)["fits_cap"]
        for config in CONFIGS
        if config.part == "four"
        and config.cap == 11 * 2**30
        and (config.precision, config.attention) == ("fp32", "sdpa")
        and config.combination in "cd"
    }
    assert fits == {"c": True, "d": False}


def test_frozen_parts_are_frozen() -> None:
    """The settings of a configuration are the model's."""
    for config in MODELS:
        if config.frozen == "nothing" or config.model != "bert":
            continue
        model = build(config, "meta", small=True).model
        trainable = {name for name, p in model.named_parameters() if p.requires_grad}
        assert 0 < len(trainable) < len(list(model.parameters()))
        if config.frozen == "all but norms":
            assert all("LayerNorm" in name for name in trainable)


def test_a_session_goes_on_where_an_earlier_one_stopped(tmp_path: Path) -> None:
    """Also after a line that was cut off; nothing is run twice."""
    path = tmp_path / "records.jsonl"
    configs = tuple(config for config in MODELS if config.model == "vit")[:3]
    end = float("inf")
    options: dict[str, Any] = {"end": end, "dry_run": True, "small_estimates": True}
    assert gpu_session.session(CpuDevice(), path, configs[:2], **options) == 0
    text = path.read_text()
    path.write_text(text + '{"schema": "freezekit.ben')
    assert records.keys_done(path) == {config.key for config in configs[:2]}
    path.write_text(text)
    assert gpu_session.session(CpuDevice(), path, configs, **options) == 0
    found = list(records.read(path))
    assert [record["key"] for record in found] == [config.key for config in configs]
    assert all(record["predicted"]["reserved"] > 0 for record in found)
    assert found[0]["versions"]["torch"] == torch.__version__


def test_the_clock_ends_a_session(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What is left is counted and told, and not begun."""
    end = time.monotonic() + 5
    left = gpu_session.session(
        CpuDevice(), tmp_path / "records.jsonl", CONFIGS[:4], end=end, dry_run=True
    )
    assert left == 4
    assert "time is over: 4 configurations are left" in capsys.readouterr().out
    assert not (tmp_path / "records.jsonl").exists()


class SmallDevice(CpuDevice):
    """Runs out of memory, or fails, as it is told; and records events."""

    def __init__(self, error: BaseException | None) -> None:
        self.error = error
        self.limits: list[int] = []

    def limit(self, nbytes: int) -> None:
        self.limits.append(nbytes)

    def synchronize(self) -> None:
        if self.error is not None:
            raise self.error

    @contextmanager
    def snapshot(self) -> Iterator[Callable[[], Any]]:
        yield lambda: {"format": "cuda-caching-allocator-events/1", "events": [["a", 0, 512]]}


@pytest.mark.parametrize(
    ("error", "outcome"),
    [(MemoryError("CUDA out of memory. Tried"), "out of memory"), (RuntimeError("x"), "failed")],
)
def test_a_configuration_that_fails_does_not_end_it(error: BaseException, outcome: str) -> None:
    """The record says how it ended, and the bound is lifted again."""
    config = next(config for config in CONFIGS if config.cap)
    device = SmallDevice(error)
    found, _ = run(config, device, small=True)
    assert found["outcome"] == outcome
    assert device.limits == [config.cap, 0]


def test_events_are_written_beside_and_named(tmp_path: Path) -> None:
    """Small enough to keep, in the format of the allocator's replay."""
    config = next(config for config in MODELS if config.snapshot)
    path = tmp_path / "records.jsonl"
    gpu_session.session(
        SmallDevice(None), path, (config,), end=float("inf"), dry_run=True, small_estimates=True
    )
    (record,) = records.read(path)
    assert (tmp_path / record["events"]).is_file()


def test_a_snapshot_is_reduced_to_its_events() -> None:
    """Addresses less the lowest; what is not the allocator's is left out."""
    actions = [("segment_alloc", 2**30, 2**21), ("alloc", 2**30, 512), ("snapshot", 0, 0)]
    actions += [("free_requested", 2**30, 512), ("free_completed", 2**30, 512)]
    trace = [{"action": a, "addr": address, "size": size} for a, address, size in actions]
    reduced = reduce_snapshot({"device_traces": [trace]})
    assert reduced["events"] == [["s+", 0, 2**21], ["a", 0, 512], ["f", 0, 512]]


def test_kernels_are_read_off_the_graph() -> None:
    """Their autograd nodes have their names."""
    query = torch.zeros(1, 2, 4, 8, requires_grad=True)
    out = torch.nn.functional.scaled_dot_product_attention(query, query, query)
    assert [name for name in attention_kernels(out.sum()) if "FlashAttention" in name]


@pytest.mark.parametrize("lines", ['{"schema": "other"}\n', "no json\n{}\n"])
def test_what_is_no_record(tmp_path: Path, lines: str) -> None:
    """The line is named."""
    path = tmp_path / "records.jsonl"
    path.write_text(lines)
    with pytest.raises(ValueError, match=r"records\.jsonl, line 1: "):
        list(records.read(path))


def test_an_unknown_name_and_no_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    """Told before anything runs."""
    with pytest.raises(SystemExit, match="2"):
        gpu_session.main(["--only", "gpt9"])
    assert "no configuration has 'gpt9' in its name" in capsys.readouterr().err
    if not torch.cuda.is_available():
        with pytest.raises(SystemExit, match="2"):
            gpu_session.main([])
        assert "torch sees no GPU; --dry-run needs none" in capsys.readouterr().err


def test_what_is_far_off_is_told() -> None:
    """The comparison that judges real records."""
    record = {
        "key": "k",
        "config": {"model": "bert"},
        "max_allocated": 1000,
        "max_reserved": 1000,
    }
    assert compare.misses(record, {"allocated": 1009, "reserved": 1029}) == []
    assert len(compare.misses(record, {"allocated": 1011, "reserved": 969})) == 2
    record["config"] = {"model": "resnet50"}
    assert compare.misses(record, {"allocated": 1029, "reserved": 941}) == []


@pytest.mark.parametrize("record", MEASURED, ids=lambda record: record["key"])
def test_estimates_meet_what_was_measured(record: dict[str, Any]) -> None:
    """Every configuration of a real session; there is none yet where no GPU was at hand."""
    config = Config(**record["config"])
    assert compare.misses(record, gpu_session.estimate(config)) == []


def test_the_record_is_json() -> None:
    """No number that JSON does not have."""
    record = records.new_record(CONFIGS[0], dry_run=True, device="CPU")
    assert json.loads(json.dumps(record, allow_nan=False)) == record
