"""The CUDA part, with a device that only pretends: caps, running out, cleaning up."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

from _four_combos import cuda
from _four_combos.combos import COMBINATIONS, Combination
from _four_combos.results import CudaSettings
from benchmarks.four_combos_support import MakeTiny, SilentProgress

GIB = 2**30
SETTINGS = CudaSettings(caps=(11 * GIB, 24 * GIB), batch_size=2, length=5)


@pytest.fixture(autouse=True)
def quick_collections() -> Iterator[None]:
    """Keep everything that is there already out of the many garbage collections."""
    gc.freeze()
    yield
    gc.unfreeze()


class FakeOutOfMemoryError(RuntimeError):
    pass


class Block:
    """Stands for a tensor on the device."""


class FakeDevice:
    """A device of 44 GiB that writes down what is asked of it."""

    name = "Fake 44"
    total_bytes = 44 * GIB
    out_of_memory: type[BaseException] = FakeOutOfMemoryError

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.blocks: list[weakref.ref[Block]] = []

    def limit(self, fraction: float) -> None:
        self.calls.append(f"limit {fraction:g}")

    def clear(self) -> None:
        alive = sum(block() is not None for block in self.blocks)
        self.calls.append(f"clear with {alive} alive")

    def peaks(self) -> tuple[int, int]:
        self.calls.append("peaks")
        return 3 * GIB, 4 * GIB

    def step(self, combination: Combination, attention: str, settings: CudaSettings) -> None:
        block = Block()
        self.blocks.append(weakref.ref(block))
        cycle: list[object] = [block]
        cycle.append(cycle)
        self.calls.append(f"step {combination.key} {attention} {settings.batch_size}")
        if combination.learns:
            raise FakeOutOfMemoryError("no more")


def test_d_runs_out_under_every_cap_and_the_others_run(progress: SilentProgress) -> None:
    device = FakeDevice()
    part = cuda.measure(device, SETTINGS, progress, device.step)
    assert (part.device, part.total_bytes) == ("Fake 44", 44 * GIB)
    keys = [(row.cap_bytes // GIB, row.attention, row.combination) for row in part.rows]
    assert keys == [(cap, a, k) for cap in (11, 24) for a in ("eager", "sdpa") for k in "abcd"]
    for row in part.rows:
        peaks = (row.peak_allocated_bytes, row.peak_reserved_bytes)
        if row.combination == "d":
            assert (row.outcome, peaks) == ("out of memory", (None, None))
        else:
            assert (row.outcome, peaks) == ("ran", (3 * GIB, 4 * GIB))
    assert progress.work == pytest.approx(cuda.total_work(SETTINGS))


def test_nothing_of_a_step_is_alive_when_memory_is_cleared(progress: SilentProgress) -> None:
    """Neither a reference cycle nor the error's traceback keeps the step's tensors."""
    device = FakeDevice()
    cuda.measure(device, SETTINGS, progress, device.step)
    assert [call for call in device.calls if call.startswith("clear")] == (
        ["clear with 0 alive"] * 2 * 16
    )


def test_the_order_of_one_measurement(progress: SilentProgress) -> None:
    device = FakeDevice()
    settings = CudaSettings(caps=(11 * GIB,), batch_size=2, length=5, attentions=("sdpa",))
    cuda.measure(device, settings, progress, device.step)
    clear = "clear with 0 alive"
    ran = [[clear, "limit 0.25", f"step {key} sdpa 2", "peaks", clear] for key in "abc"]
    assert device.calls == [
        *(call for calls in ran for call in calls),
        *(clear, "limit 0.25", "step d sdpa 2", clear),
        "limit 1",
    ]


def test_the_cap_is_lifted_after_another_error_too(progress: SilentProgress) -> None:
    device = FakeDevice()

    def step(combination: Combination, attention: str, settings: CudaSettings) -> None:
        raise ValueError("not about memory")

    with pytest.raises(ValueError, match="not about memory"):
        cuda.measure(device, SETTINGS, progress, step)
    assert device.calls[-1] == "limit 1"


def test_a_cap_above_the_device_is_not_measured(progress: SilentProgress) -> None:
    device = FakeDevice()
    settings = CudaSettings(caps=(80 * GIB,), batch_size=2, length=5)
    part = cuda.measure(device, settings, progress, device.step)
    assert {row.outcome for row in part.rows} == {"cap above device"}
    assert device.calls == ["limit 1"]


def test_the_real_device_asks_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[object] = []

    def fake(name: str, answer: object = None) -> None:
        assert callable(getattr(torch.cuda, name))

        def call(*given: object) -> object:
            calls.append((name, *given))
            return answer

        monkeypatch.setattr(torch.cuda, name, call)

    fake("get_device_properties", SimpleNamespace(name="GPU", total_memory=10))
    fake("set_per_process_memory_fraction")
    fake("empty_cache")
    fake("reset_peak_memory_stats")
    fake("synchronize")
    fake("max_memory_allocated", 5)
    fake("max_memory_reserved", 6)
    device: cuda.Device = cuda.CudaDevice()
    assert (device.name, device.total_bytes) == ("GPU", 10)
    assert device.out_of_memory is torch.OutOfMemoryError
    calls.clear()
    device.limit(0.5)
    device.clear()
    assert device.peaks() == (5, 6)
    assert calls == [
        ("set_per_process_memory_fraction", 0.5),
        ("empty_cache",),
        ("reset_peak_memory_stats",),
        ("synchronize",),
        ("max_memory_allocated",),
        ("max_memory_reserved",),
    ]


@pytest.mark.parametrize("combination", COMBINATIONS, ids=lambda c: c.key)
def test_the_step_trains(combination: Combination, make_tiny: MakeTiny) -> None:
    model, untouched = make_tiny(), make_tiny()
    cuda.train_steps(model, combination, SETTINGS, "cpu")
    assert not torch.equal(model.out.weight, untouched.out.weight)
    word_embedding = model.bert.embeddings.word_embeddings.weight
    before = untouched.bert.embeddings.word_embeddings.weight
    assert torch.equal(word_embedding, before) is not combination.learns
