"""Options of estimate_memory, what its report says, and what it refuses."""

from __future__ import annotations

import json
import random
import warnings
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from freezekit import MemoryEstimate, estimate_memory, frozen
from freezekit._memory.devices import CONTEXT
from freezekit.errors import TraceError, UnsupportedModelError

MIB = 1 << 20


def mlp(width: int = 512) -> nn.Sequential:
    """Two layers."""
    return nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 2))


def batch(size: int = 64, width: int = 512) -> torch.Tensor:
    """Rows without data."""
    return torch.empty(size, width, device="meta")


# -- the optimizer -----------------------------------------------------------------------------


def test_a_live_optimizer_counts_with_its_state() -> None:
    """State that is there already is there from the first step on; the optimizer is not touched."""
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    torch.sum(model(torch.zeros(2, 512))).backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    state = {id(t): t.clone() for s in optimizer.state.values() for t in s.values()}
    values = [p.clone() for p in model.parameters()]
    by_name = estimate_memory(model, batch(), steps=3)
    live = estimate_memory(model, batch(), optimizer=optimizer, steps=3)
    assert live.optimizer == "AdamW"
    # By name the first forward runs before there is state.
    first = {e: e.timeline[1].peak_allocated for e in (by_name, live)}
    assert first[live] - first[by_name] >= 2 * sum(p.nbytes for p in model.parameters())
    assert live.peak_allocated == pytest.approx(by_name.peak_allocated, rel=0.01)
    assert all(torch.equal(state[id(t)], t) for s in optimizer.state.values() for t in s.values())
    assert all(map(torch.equal, model.parameters(), values))


def test_an_optimizer_over_part_of_the_model() -> None:
    """A live optimizer's own groups count, not all that is trainable."""
    model = mlp()
    part = torch.optim.AdamW(model[2].parameters())
    whole = torch.optim.AdamW(model.parameters())
    sizes = [
        dict(estimate_memory(model, batch(), optimizer=optimizer).breakdown)["optimizer_state"]
        for optimizer in (part, whole)
    ]
    assert 0 < sizes[0] < sizes[1]


@pytest.mark.parametrize("name", ["adamw", "AdamW", "sgd", "adadelta", "adafactor", "muon"])
def test_optimizers_by_name(name: str) -> None:
    """Those of torch.optim, whatever the case."""
    model = nn.Linear(64, 64, bias=False)
    estimate = estimate_memory(model, torch.zeros(4, 64), optimizer=name)
    assert estimate.optimizer == name


# -- the loop ----------------------------------------------------------------------------------


def test_a_scaler_changes_scalars_only() -> None:
    """The loss is multiplied by a scalar."""
    plain, scaled = (estimate_memory(mlp(), batch(), scaler=scaler) for scaler in (False, True))
    assert 0 < scaled.peak_allocated - plain.peak_allocated <= 4096


def test_clipping_accumulating_and_the_place_of_zero_grad() -> None:
    """Clipping needs norms; gradients that are kept until the end are there in the forward pass."""
    model = mlp(1024)
    inputs = batch(16, 1024)
    phases = {phase.phase for phase in estimate_memory(model, inputs, clip=1.0).timeline}
    assert "clip" in phases

    def second_forward(**options: Any) -> int:
        timeline = estimate_memory(model, inputs, optimizer="sgd", **options).timeline
        return next(p.peak_allocated for p in timeline if p.step == 1 and p.phase == "forward")

    weights = sum(p.nbytes for p in model.parameters())
    assert second_forward(zero_grad="before_backward") >= second_forward() + weights


def test_more_steps_are_repeated_not_traced() -> None:
    """The second step's events, again and again; what is left at the end is freed at the end."""
    estimates = [estimate_memory(mlp(), batch(), steps=steps) for steps in (2, 3, 10)]
    assert len({e.peak_allocated for e in estimates}) == 1
    assert {p.step for p in estimates[2].timeline} == {-1, *range(10)}
    counts = [len(e.stream.events) for e in estimates]
    assert counts[2] - counts[1] == 7 * (counts[1] - counts[0])
    assert estimates[0].stream.live_bytes()[-1] == estimates[2].stream.live_bytes()[-1]


def test_a_model_that_keeps_more_each_step_is_traced_step_by_step() -> None:
    """What grows cannot be repeated: a cache of features with its graph."""

    class Leaky(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(256, 256)
            self.kept: list[torch.Tensor] = []

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.linear(x)
            self.kept.append(out)
            return out

    model = Leaky()
    estimate = estimate_memory(model, torch.zeros(1024, 256), optimizer="sgd", steps=5)
    peaks = [p.peak_allocated for p in estimate.timeline if p.phase == "forward"]
    assert all(after - before >= MIB for before, after in pairwise(peaks))
    assert model.kept == []


# -- budgets and GPUs --------------------------------------------------------------------------


def test_a_budget_bounds_the_allocator() -> None:
    """Under a budget the step runs, or the report says what was asked for and what was free."""
    room = estimate_memory(mlp(), batch(4096), budget="24GiB")
    assert room.out_of_memory == ""
    assert "budget 24.0 GiB: fits" in str(room)
    tight = estimate_memory(mlp(), batch(65536), budget="700MiB")
    assert "tried to allocate" in tight.out_of_memory
    assert "does not fit: tried to allocate" in str(tight)


def test_near_its_limit_the_allocator_gives_cached_memory_back() -> None:
    """A step may fit into less than it reserves with room; ``fits`` knows."""
    stream = estimate_memory(mlp(), batch(8192))
    assert stream.lacks(stream.peak_reserved) == ""
    assert "tried to allocate" in stream.lacks(stream.peak_allocated // 2)
    assert "tried to allocate" in stream.lacks(0)


def test_gpus_by_name() -> None:
    """A GPU's name is a device and a budget."""
    estimate = estimate_memory(mlp(), batch(), device="NVIDIA H100 80GB HBM3", budget="H200")
    assert dict(estimate.breakdown)["workspaces"] >= 2 * 32 * MIB
    assert estimate.fits("NVIDIA GeForce RTX 2080 Ti")
    with pytest.raises(ValueError, match="unknown GPU 'RTX 2080 Tie'; near names: NVIDIA GeForce"):
        estimate.fits("RTX 2080 Tie")


def test_the_safe_figure_says_what_it_covers() -> None:
    """Its margins add up, and convolutions and varying lengths have their own."""
    plain = estimate_memory(mlp(), batch())
    assert plain.safe == plain.peak_reserved + sum(size for _, size in plain.margins)
    varying = estimate_memory(mlp(), batch(65536), lengths="vary", steps=2)
    assert "shorter batches before up to" in dict(varying.margins)
    low, high = plain.total
    assert plain.peak_reserved + plain.context[0] == low < high == plain.safe + plain.context[1]


def test_a_shorter_batch_between_others_leaves_what_they_cannot_use() -> None:
    """With ``lengths="vary"`` the second of three steps is shorter: its logits fit no longer."""
    model = nn.Sequential(nn.Embedding(8192, 256), nn.Linear(256, 256), nn.Linear(256, 8192))
    tokens = torch.empty(32, 128, dtype=torch.long, device="meta")

    def loss(logits: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())

    fixed = estimate_memory(model, tokens, loss=loss)
    varying = estimate_memory(model, tokens, loss=loss, lengths="vary")
    logits = 32 * 128 * 8192 * 4
    assert varying.safe - fixed.safe >= 0.9 * logits
    assert varying.peak_reserved == fixed.peak_reserved


def test_what_is_safe_stays_within_the_budget_less_the_least_context() -> None:
    """More cannot be reserved; what does not fit has its margins."""
    inputs = batch(1 << 22)
    roomy = estimate_memory(mlp(), inputs)
    tight = estimate_memory(mlp(), inputs, budget=roomy.peak_reserved + CONTEXT[1] + MIB)
    assert not tight.out_of_memory
    assert tight.safe == tight.peak_reserved + CONTEXT[1] - CONTEXT[0] + MIB < roomy.safe
    small = estimate_memory(mlp(), inputs, budget=roomy.peak_reserved // 2)
    assert small.out_of_memory
    assert (small.peak_reserved, small.safe) == (roomy.peak_reserved, roomy.safe)


# -- the report --------------------------------------------------------------------------------


def test_what_freezing_changed_term_by_term() -> None:
    """Two estimates side by side."""
    model = mlp()
    full = estimate_memory(model, batch())
    with frozen(model, "0"):
        half = estimate_memory(model, batch())
    comparison = full.compare(half)
    terms = dict(comparison.terms)
    assert terms["parameters"][0] == terms["parameters"][1]
    assert terms["optimizer_state"][0] > 100 * terms["optimizer_state"][1]
    assert comparison.peak_reserved == (full.peak_reserved, half.peak_reserved)
    assert "optimizer state" in str(comparison)
    assert json.loads(json.dumps(comparison.to_dict()))["schema"] == "freezekit.MemoryComparison/1"


def test_taking_parameters_for_frozen_is_freezing_them() -> None:
    """``frozen=`` answers what freezing would change, and changes nothing."""
    model = mlp()
    names = ["0.weight", "0.bias"]
    asked = estimate_memory(model, batch(), frozen=names)
    assert all(p.requires_grad for p in model.parameters())
    model[0].requires_grad_(requires_grad=False)
    assert estimate_memory(model, batch()) == asked


def test_the_timeline_is_in_order() -> None:
    """Phases follow each other, and the highest is the peak."""
    estimate = estimate_memory(mlp(), batch(), steps=2)
    phases = [(p.step, p.phase) for p in estimate.timeline if p.step >= 0]
    assert phases[:3] == [(0, "forward"), (0, "backward"), (0, "optimizer")]
    assert max(p.peak_allocated for p in estimate.timeline) == estimate.peak_allocated
    assert max(p.reserved for p in estimate.timeline) == estimate.peak_reserved


def test_the_modules_hold_what_is_allocated() -> None:
    """Rows of the top level add up to the whole, but for what no module made."""
    estimate = estimate_memory(mlp(), batch())
    top = sum(row.nbytes for row in estimate.modules if row.depth == 0)
    assert 0.5 * estimate.peak_allocated < top <= estimate.peak_allocated
    assert "events" not in estimate.to_dict()
    assert json.loads(json.dumps(estimate.to_dict()))["timeline"]


def test_a_compiled_model_is_its_eager_self() -> None:
    """The estimate is that of the module inside, and says so."""
    model = mlp()
    plain = estimate_memory(model, batch())
    compiled: Any = torch.compile(model, backend="eager")
    inside = mlp()
    inside[0].compile(backend="eager")
    for form in (compiled, inside):
        estimate = estimate_memory(form, batch())
        assert estimate.peak_allocated == plain.peak_allocated
        assert "compiled code is estimated as the eager module inside it" in estimate.assumptions
    nested = nn.Sequential(compiled, nn.Linear(2, 2))
    assert estimate_memory(nested, batch()).peak_allocated >= plain.peak_allocated


# -- bad input ---------------------------------------------------------------------------------


@pytest.mark.parametrize("inputs", [None, (), {}, []], ids=str)
def test_no_inputs(inputs: Any) -> None:
    """Without shapes there is no estimate."""
    with pytest.raises(ValueError, match="no inputs: what a step takes depends on their shapes"):
        estimate_memory(mlp(), inputs)


def test_inputs_without_tensors() -> None:
    """Numbers and texts have no shape."""
    with pytest.raises(ValueError, match=r"no tensor in the inputs \(list\)"):
        estimate_memory(mlp(), [1, 2])


@pytest.mark.parametrize("budget", ["eleven", "11 apples", -1])
def test_what_is_no_budget(budget: Any) -> None:
    """Neither a size nor a GPU."""
    with pytest.raises(ValueError, match=r"unknown GPU 'eleven'|expected a size such as"):
        estimate_memory(mlp(), batch(), budget=budget)


def test_what_is_no_version() -> None:
    """A version has a major and a minor number."""
    with pytest.raises(ValueError, match=r"such as '2\.6\.0', got 'two\.six'"):
        estimate_memory(mlp(), batch(), torch_version="two.six")


def sparse() -> nn.Module:
    """A buffer of indices and values."""
    model = mlp()
    model.register_buffer("mask", torch.eye(3).to_sparse())
    return model


def nested() -> nn.Module:
    """A buffer of rows of different lengths."""
    model = mlp()
    rows = torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)], layout=torch.jagged)
    model.register_buffer("rows", rows)
    return model


def lazy() -> nn.Module:
    """A layer without a size."""
    return nn.Sequential(nn.LazyLinear(3))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (sparse, "the buffer 'mask' is a sparse tensor"),
        (nested, "the buffer 'rows' is a nested tensor"),
        (lazy, "the parameter '0.weight' is not initialized yet"),
    ],
)
def test_what_has_no_storage_is_refused_by_name(
    make: Callable[[], nn.Module], message: str
) -> None:
    """Its memory could only be guessed."""
    with pytest.raises(UnsupportedModelError, match=message):
        estimate_memory(make(), batch())


def test_quantized_tensors_count_with_their_storage() -> None:
    """A byte an element."""
    model = mlp()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch means to drop them; models still have them
        table = torch.quantize_per_tensor(torch.zeros(MIB), 0.1, 0, torch.qint8)
    model.register_buffer("table", table)
    plain = dict(estimate_memory(mlp(), batch()).breakdown)["buffers"]
    assert dict(estimate_memory(model, batch()).breakdown)["buffers"] == plain + MIB


class Failing(nn.Module):
    """Fails where it is told to."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
        self.where = where

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layers(x)
        if self.where == "forward":
            raise RuntimeError("on purpose")
        if self.where == "shape":
            out = out @ torch.ones(5, 5)
        if self.where == "dtype":
            torch.set_default_dtype(torch.float64)
            raise RuntimeError("on purpose")
        if self.where == "backward":
            # It has no derivative, which the backward pass finds out.
            out = torch.unique(out, dim=0)
        return out


@settings(deadline=None, max_examples=25)
@given(
    st.sampled_from(["", "forward", "shape", "dtype", "backward", "loss", "inputs", "optimizer"]),
    st.booleans(),
    st.booleans(),
)
def test_nothing_of_the_users_changes(where: str, has_grad: bool, train: bool) -> None:
    """Whether it succeeds or fails: values, gradients, modes, hooks, random state, dtype."""
    model = Failing(where).train(train)
    if has_grad:
        model.layers[0].weight.grad = torch.ones(4, 4)
    inputs = torch.randn(8, 5 if where == "inputs" else 4)
    before = _state(model, inputs)
    options: dict[str, Any] = {}
    if where == "loss":
        options["loss"] = lambda out: out.no_such_attribute
    if where == "optimizer":
        options["optimizer"] = "adamv"
    if where:
        with pytest.raises((TraceError, ValueError), match=r"the step failed in|unknown optimizer"):
            estimate_memory(model, inputs, **options)
    else:
        assert isinstance(estimate_memory(model, inputs), MemoryEstimate)
    assert _state(model, inputs) == before


def _state(model: nn.Module, inputs: torch.Tensor) -> tuple[Any, ...]:
    def values(tensor: torch.Tensor | None) -> Any:
        return None if tensor is None else tensor.tolist()

    return (
        [
            (n, values(p), values(p.grad), p.requires_grad, id(p))
            for n, p in model.named_parameters()
        ],
        [(n, values(b), id(b)) for n, b in model.named_buffers()],
        [(m.training, len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()],
        torch.random.get_rng_state().tolist(),
        random.getstate(),
        torch.get_default_dtype(),
        torch.is_grad_enabled(),
        values(inputs),
    )


def test_a_failure_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    """By the error that is raised, not by a traceback in the log as well."""
    with pytest.raises(TraceError, match="the step failed in 0"):
        estimate_memory(mlp(), batch(width=3))
    assert not caplog.records


def test_targets_without_data_beside_the_model() -> None:
    """A loss may hold labels on the meta device, as the inputs may be."""
    labels = torch.empty(64, dtype=torch.long, device="meta")
    weights = torch.empty(2, device="meta")

    def loss(outputs: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(outputs, labels.flatten(), weight=weights.abs())

    on_meta = estimate_memory(mlp(), batch(), loss=loss)
    real = torch.zeros(64, dtype=torch.long), torch.ones(2)
    with_data = estimate_memory(
        mlp(),
        batch(),
        loss=lambda out: nn.functional.cross_entropy(out, real[0].flatten(), weight=real[1].abs()),
    )
    assert on_meta.peak_reserved == with_data.peak_reserved
