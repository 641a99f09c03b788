"""One configuration, run: three steps, and what they took."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import torch
from torch import nn

from _gpu_session.build import Setup, build
from _gpu_session.configs import Config

__all__ = ["OUTCOMES", "CpuDevice", "Device", "run"]

STEPS = 3
TIMED_STEPS = 10
OUTCOMES = ("ran", "out of memory", "failed")


class Device(Protocol):
    """What a session needs of a device."""

    name: str
    kind: str
    total_bytes: int
    out_of_memory: type[BaseException]

    def clear(self) -> None:
        """Give cached memory back and begin new peaks."""

    def limit(self, nbytes: int) -> None:
        """Let this process reserve so much; 0 for all there is."""

    def synchronize(self) -> None:
        """Wait for what runs."""

    def figures(self) -> dict[str, int | None]:
        """Peaks, and what the process has beside them, in bytes."""

    def snapshot(self) -> AbstractContextManager[Callable[[], Any]]:
        """Record the allocator's events inside the block; call the result for them."""


class CpuDevice:
    """A CPU that stands in for a GPU in a dry run: it has no figures."""

    name = "CPU"
    kind = "cpu"
    total_bytes = 0
    out_of_memory: type[BaseException] = MemoryError

    def clear(self) -> None:
        """Nothing is cached."""

    def limit(self, nbytes: int) -> None:
        """There is no bound."""

    def synchronize(self) -> None:
        """Nothing runs on."""

    def figures(self) -> dict[str, int | None]:
        """Null: not measured."""
        return dict.fromkeys(("max_allocated", "max_reserved", "left_allocated", "context"))

    @contextmanager
    def snapshot(self) -> Iterator[Callable[[], Any]]:
        """No events."""
        yield lambda: None


def run(config: Config, device: Device, *, small: bool) -> tuple[dict[str, Any], Any]:
    """Run a configuration; returns what to add to its record, and its events, if recorded."""
    device.clear()
    device.limit(config.cap)
    begun = time.monotonic()
    found: dict[str, Any] = {"outcome": "failed", "error": ""}
    events = None
    try:
        with device.snapshot() if config.snapshot else nullcontext(lambda: None) as recorded:
            measured = _part(config, device, small=small)
            events = recorded()
        found |= {"outcome": "ran", **measured, **device.figures()}
    except device.out_of_memory as error:
        found |= {"outcome": "out of memory", "error": str(error).split(". ")[0]}
    except Exception as error:  # noqa: BLE001  (one that fails does not end the session)
        found |= {"error": f"{type(error).__name__}: {error}"}
    finally:
        device.limit(0)
    # Only now: while the error lives, its traceback holds the step's tensors.
    gc.collect()
    device.clear()
    found["left_allocated"] = device.figures()["max_allocated"]
    found["seconds"] = round(time.monotonic() - begun, 3)
    return found, events


def _part(config: Config, device: Device, *, small: bool) -> dict[str, Any]:
    setup = build(config, device.kind, small=small)
    if config.model == "extractor":
        return _extractor_overhead(setup, device)
    if config.combination == "cached":
        return _cached(setup, device)
    return _train(config, setup, device)


def _train(config: Config, setup: Setup, device: Device) -> dict[str, Any]:
    optimizer = _optimizer(config, [p for p in setup.model.parameters() if p.requires_grad])
    cast = (
        torch.autocast(device.kind, torch.bfloat16)
        if config.precision == "autocast"
        else nullcontext()
    )
    kernels: list[str] = []
    seconds = []
    count = TIMED_STEPS if config.part == "time" else STEPS
    outputs = loss = None
    for number in range(count):
        device.synchronize()
        begun = time.perf_counter()
        optimizer.zero_grad(set_to_none=True)
        # As in a user's loop the last output and loss are alive until the new ones are there.
        with cast:
            outputs = _call(setup.model, setup.inputs)
            loss = outputs.loss if setup.loss is None else setup.loss(outputs)
        if number == 0:
            kernels = attention_kernels(loss)
        torch.autograd.backward(loss)
        optimizer.step()
        device.synchronize()
        seconds.append(time.perf_counter() - begun)
    del outputs, loss
    return {"step_seconds": [round(s, 5) for s in seconds], "attention_kernels": kernels}


def _optimizer(config: Config, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    if config.optimizer == "sgd":
        return torch.optim.SGD(parameters, lr=1e-3)
    if config.optimizer == "adam":
        return torch.optim.Adam(parameters, lr=1e-3)
    return torch.optim.AdamW(parameters, lr=1e-3, fused=config.optimizer.endswith("fused") or None)


def _call(model: nn.Module, inputs: Any) -> Any:
    return model(**inputs) if isinstance(inputs, dict) else model(inputs)


def attention_kernels(loss: torch.Tensor) -> list[str]:
    """Which attentions the graph of ``loss`` has: the names of their autograd nodes."""
    names: set[str] = set()
    seen: set[Any] = set()
    waiting = [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if "Attention" in node.name():
            names.add(node.name())
        waiting += [following for following, _ in node.next_functions]
    return sorted(names)


def _cached(setup: Setup, device: Device) -> dict[str, Any]:
    """Steps of the head alone, on features that were computed once."""
    model: Any = setup.model
    assert setup.loss is not None
    with torch.no_grad():
        features = model.features(setup.inputs)
    optimizer = torch.optim.Adam(model.head_parameters(), lr=1e-3)
    seconds = []
    for _ in range(TIMED_STEPS):
        device.synchronize()
        begun = time.perf_counter()
        optimizer.zero_grad(set_to_none=True)
        torch.autograd.backward(setup.loss(model.classify(features)))
        optimizer.step()
        device.synchronize()
        seconds.append(time.perf_counter() - begun)
    return {"step_seconds": [round(s, 5) for s in seconds]}


def _extractor_overhead(setup: Setup, device: Device) -> dict[str, Any]:
    """A frozen backbone's forward, bare and through the extractor, in turns."""
    import freezekit

    backbone: Any = setup.model
    bert = backbone.bert.eval()
    extractor = freezekit.FrozenFeatureExtractor(bert)
    bare: list[float] = []
    wrapped: list[float] = []
    for number in range(2 * TIMED_STEPS):
        device.synchronize()
        begun = time.perf_counter()
        if number % 2:
            extractor(setup.inputs)
        else:
            with torch.no_grad():
                bert(setup.inputs)
        device.synchronize()
        (wrapped if number % 2 else bare).append(time.perf_counter() - begun)
    # The first of each pays for what is loaded once.
    return {
        "bare_seconds": round(statistics.median(bare[1:]), 6),
        "extractor_seconds": round(statistics.median(wrapped[1:]), 6),
    }
