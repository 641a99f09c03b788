"""The fake trace: the same bytes as a real run, and nothing of the user's is touched."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from freezekit import estimate_memory, freeze
from freezekit._memory.answers import DataFunctions
from freezekit._memory.as_real import as_real
from freezekit._memory.events import Allocation, Event, EventStream
from freezekit._memory.recorder import Recorder
from freezekit._memory.replay import replay
from freezekit._memory.shadow import Shadow
from freezekit._memory.steps import Steps, run_first_step, run_steps

MIB = 1 << 20


def adamw(parameters: list[nn.Parameter]) -> Optimizer:
    """As CUDA has it by default: foreach."""
    return torch.optim.AdamW(parameters, foreach=True)


def sgd(parameters: list[nn.Parameter]) -> Optimizer:
    """With momentum, which its first step makes."""
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def mlp() -> tuple[nn.Module, Any]:
    """Three blocks."""
    blocks = [nn.Sequential(nn.Linear(16, 16), nn.ReLU()) for _ in range(3)]
    return nn.Sequential(*blocks), torch.randn(8, 16)


def frozen_mlp(*names: str) -> Callable[[], tuple[nn.Module, Any]]:
    """Three blocks, some of them frozen."""

    def make() -> tuple[nn.Module, Any]:
        model, inputs = mlp()
        freeze(model, list(names))
        return model, inputs

    return make


def cnn() -> tuple[nn.Module, Any]:
    """Convolution, statistics, pooling."""
    layers = [nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(36, 2)), torch.randn(4, 3, 8, 8)


def gru() -> tuple[nn.Module, Any]:
    """Two recurrent layers with dropout between them."""
    return nn.GRU(4, 8, num_layers=2, batch_first=True, dropout=0.5), torch.randn(2, 5, 4)


def bert(attention: str) -> Callable[[], tuple[nn.Module, Any]]:
    """Two tiny layers, with a loss of their own."""

    def make() -> tuple[nn.Module, Any]:
        from transformers import BertConfig, BertForSequenceClassification

        config = BertConfig(
            hidden_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=32,
            vocab_size=50,
            attn_implementation=attention,
        )
        ids = torch.randint(0, 50, (3, 10))
        inputs = {"input_ids": ids, "labels": torch.tensor([0, 1, 0])}
        return BertForSequenceClassification(config), inputs

    return make


def fake_run(model: nn.Module, inputs: Any, steps: Steps) -> EventStream:
    """What a fake trace records, without any device's rules."""
    shadow = Shadow()
    twin, twin_inputs = shadow.copy(model), shadow.inputs(inputs)
    recorder = Recorder(known=shadow.known)
    with as_real(shadow.known), shadow.mode, DataFunctions(recorder.answers):
        return run_steps(recorder, twin, twin_inputs, steps)


@pytest.mark.parametrize(
    "steps",
    [
        pytest.param(Steps(count=2, optimizer=adamw), id="adamw"),
        pytest.param(Steps(count=3, optimizer=sgd, zero_grad="before_backward"), id="sgd"),
        pytest.param(Steps(count=2, optimizer=adamw, accumulate=2, zero_grad="end"), id="twice"),
        pytest.param(Steps(count=2, train=False), id="inference"),
    ],
)
@pytest.mark.parametrize(
    "make",
    [
        pytest.param(mlp, id="mlp"),
        pytest.param(frozen_mlp("0"), id="front-frozen"),
        pytest.param(frozen_mlp("2"), id="back-frozen"),
        pytest.param(cnn, id="cnn"),
        pytest.param(gru, id="gru"),
        pytest.param(bert("eager"), id="bert-eager"),
        pytest.param(bert("sdpa"), id="bert-sdpa"),
    ],
)
def test_a_fake_trace_is_a_real_run(
    make: Callable[[], tuple[nn.Module, Any]], steps: Steps
) -> None:
    """Live bytes at every boundary of a step and at the peak are the same, to the byte."""
    torch.manual_seed(0)
    model, inputs = make()
    fake = fake_run(model, inputs, steps)
    real = run_steps(Recorder(), copy.deepcopy(model), copy.deepcopy(inputs), steps)
    assert fake.boundaries() == real.boundaries()
    assert fake.peak_bytes() == real.peak_bytes() > 0
    assert [a[:2] for a in fake.allocations] == [a[:2] for a in real.allocations]
    assert {a.module for a in fake.allocations} == {a.module for a in real.allocations}


@pytest.mark.parametrize("padded", [0, 3])
def test_masks_are_kept_where_something_is_padded(padded: int) -> None:
    """As for real: a mask of ones is left out, also a fake one whose values are known."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 96}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2))
    ids, mask = torch.randint(0, 96, (2, 12)), torch.ones(2, 12, dtype=torch.long)
    mask[-1, 12 - padded :] = 0
    inputs = {"input_ids": ids, "labels": ids, "attention_mask": mask}
    steps = Steps(count=2, optimizer=sgd)
    fake = fake_run(model, inputs, steps)
    real = run_steps(Recorder(), copy.deepcopy(model), copy.deepcopy(inputs), steps)
    assert fake.boundaries() == real.boundaries()
    assert fake.peak_bytes() == real.peak_bytes()


def test_categories_are_what_tensors_are_for() -> None:
    """Parameters, gradients and optimizer state have the sizes that they must have."""
    model, inputs = mlp()
    stream = fake_run(model, inputs, Steps(count=1, optimizer=adamw))
    sums: dict[str, int] = {}
    for allocation in stream.allocations:
        sums[allocation.category] = sums.get(allocation.category, 0) + allocation.nbytes
    weights = sum(p.nbytes for p in model.parameters())
    assert sums["parameters"] == weights
    assert sums["gradients"] == weights
    assert sums["optimizer_state"] == 2 * weights + 4 * 6  # and a step count for each tensor
    assert sums["inputs"] == inputs.nbytes


@pytest.mark.parametrize(
    ("frozen", "units"),
    [((), 3), (("0", "1"), 2), (("1", "2"), 3), (("0", "1", "2"), 0)],
    ids=["nothing", "front", "back", "everything"],
)
def test_frozen_in_front_is_free_and_frozen_behind_is_not(
    frozen: tuple[str, ...], units: int
) -> None:
    """What is kept for backward: each ReLU's output, from the first block that learns upwards.

    In front of it only that block's own input is kept, for the gradient of its weight.
    """
    model, inputs = mlp()
    for name in frozen:
        model.get_submodule(name).requires_grad_(requires_grad=False)
    stream = fake_run(model, inputs, Steps(count=1, loss=torch.sum))
    live = {e.allocation for e in stream.events if e.is_alloc and e.phase == "forward"}
    live -= {e.allocation for e in stream.events if not e.is_alloc and e.phase == "forward"}
    kept = [stream.allocations[i].nbytes for i in live]
    # The output is alive in any case, and so is the loss.
    assert sorted(kept) == [4, *[inputs.nbytes] * max(units, 1)]


def test_backward_belongs_to_its_module() -> None:
    """What the backward pass allocates is told of the module whose operation it goes back over."""
    model, inputs = mlp()
    stream = fake_run(model, inputs, Steps(count=1))
    found = {a.module for a in stream.allocations if a.category == "gradients"}
    assert found == {"0.0", "1.0", "2.0"}


def test_memory_shared_by_tensors_is_counted_once() -> None:
    """Tied parameters, and a view of a larger memory, have twins over one memory."""
    flat = torch.zeros(10, 4)
    model = nn.Module()
    model.first = nn.Parameter(flat[:3])
    model.second = nn.Parameter(flat[3:])
    model.tied = model.first
    twin: Any = Shadow().copy(model)
    storages = {twin.first.untyped_storage()._cdata, twin.second.untyped_storage()._cdata}
    assert len(storages) == 1
    assert twin.tied is twin.first
    assert twin.first.untyped_storage().nbytes() == flat.nbytes


def test_a_model_without_data_is_traced() -> None:
    """A model on the meta device gives the bytes that it would have."""
    model, inputs = mlp()
    steps = Steps(count=2, optimizer=adamw)
    on_meta = copy.deepcopy(model).to("meta")
    expected = fake_run(model, inputs, steps)
    assert fake_run(on_meta, inputs.to("meta"), steps) == expected


def test_values_that_code_asks_for_have_stand_ins() -> None:
    """``.item()`` and ``if tensor:`` do not end a trace; how many is known."""

    class Asks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(2, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if (x > 0).all():
                raise AssertionError("the question is answered with False")
            result: torch.Tensor = self.linear(x) * x.max().item()
            return result

    shadow, recorder = Shadow(), Recorder()
    twin, inputs = shadow.copy(Asks()), shadow.inputs(torch.zeros(3, 2))
    with shadow.mode:
        run_steps(recorder, twin, inputs, Steps(count=2))
    assert recorder.answers.values == 4


def test_inputs_keep_their_structure() -> None:
    """Mappings, tuples and what is no tensor come back as they are."""
    inputs = {"a": torch.zeros(2), "b": (torch.ones(1), "text"), "c": [3, torch.zeros(1)]}
    twins = Shadow().inputs(inputs)
    assert list(twins) == ["a", "b", "c"]
    assert twins["b"][1] == "text"
    assert twins["c"][0] == 3
    assert type(twins["a"]).__name__ == type(twins["b"][0]).__name__ == "FakeTensor"


def test_a_steady_step_is_repeated_as_it_would_be_traced() -> None:
    """Two traced steps and three repeated ones are five traced steps, event by event."""
    model, inputs = mlp()
    short = fake_run(model, inputs, Steps(count=2, optimizer=adamw))
    long = fake_run(model, inputs, Steps(count=5, optimizer=adamw))
    repeated = short.repeated(3)
    assert repeated is not None
    assert repeated.live_bytes() == long.live_bytes()
    assert [(e.is_alloc, e.phase, e.step) for e in repeated.events] == [
        (e.is_alloc, e.phase, e.step) for e in long.events
    ]
    assert repeated.allocations == long.allocations


def seen(stream: EventStream | None) -> list[Any]:
    """All that happens before the loop is left: allocations, and what is freed between two.

    (The order in which autocast's cache lets go of its casts is a hash table's.)
    """
    assert stream is not None
    found: list[Any] = [set()]
    for event in stream.events:
        if event.is_alloc:
            found += [event, set()]
        elif event.phase != "setup":
            found[-1].add(event)
    return found


class Cached(nn.Linear):
    """A module that keeps a tensor of its first forward."""

    table: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.table is None:
            self.table = torch.ones(x.shape)
        return super().forward(x * self.table)


class Replaced(nn.Linear):
    """A module whose every forward makes a tensor anew that the one before made."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.last = x * 2
        return super().forward(self.last.detach())


@pytest.mark.parametrize(
    "steps",
    [
        pytest.param(Steps(optimizer=adamw), id="adamw"),
        pytest.param(Steps(optimizer=sgd, zero_grad="before_backward"), id="before-backward"),
        pytest.param(Steps(optimizer=sgd, zero_grad="end", clip=1.0), id="end-clip"),
        pytest.param(Steps(optimizer=adamw, accumulate=3), id="accumulate"),
        pytest.param(Steps(optimizer=adamw, accumulate=2, zero_grad="end"), id="accumulate-end"),
        pytest.param(Steps(optimizer=sgd, autocast=torch.bfloat16, scaler=True), id="autocast"),
        pytest.param(Steps(), id="no-optimizer"),
        pytest.param(Steps(train=False), id="inference"),
    ],
)
@pytest.mark.parametrize(
    "make",
    [
        pytest.param(mlp, id="mlp"),
        pytest.param(frozen_mlp("0", "2"), id="middle"),
        pytest.param(cnn, id="cnn"),
        pytest.param(gru, id="gru"),
        pytest.param(bert("sdpa"), id="bert"),
    ],
)
def test_a_second_step_is_as_it_would_be_traced(
    make: Callable[[], tuple[nn.Module, Any]], steps: Steps
) -> None:
    """Put together from the first it is what a trace of both sees, event by event."""
    model, inputs = make()
    both, inferred = fake_run(model, inputs, steps), inferred_run(model, inputs, steps)
    assert seen(inferred) == seen(both)
    assert inferred is not None
    assert inferred.allocations == both.allocations


def inferred_run(model: nn.Module, inputs: Any, steps: Steps) -> EventStream | None:
    """The same as :func:`fake_run`, of which the second step is not traced."""
    shadow, recorder = Shadow(), Recorder()
    twin, twin_inputs = shadow.copy(model), shadow.inputs(inputs)
    with shadow.mode:
        return run_first_step(recorder, twin, twin_inputs, steps).two_steps()


@pytest.mark.parametrize("kind", [Cached, Replaced])
def test_a_second_step_unlike_the_first_is_traced(kind: type[nn.Linear]) -> None:
    """A module that keeps tensors from step to step: the estimate is of whole steps."""
    model, inputs = nn.Sequential(kind(64, 64)), torch.ones(32, 64)
    assert inferred_run(model, inputs, Steps(optimizer=adamw)) is None
    whole = fake_run(model, inputs, Steps(count=3, optimizer=adamw))
    estimate = estimate_memory(model, inputs)
    made = [a for a in estimate.stream.allocations if a.category != "workspaces"]
    assert [a[:6] for a in made] == [a[:6] for a in whole.allocations]


@pytest.mark.parametrize("count", [0, 1])
def test_a_first_step_is_not_repeated(count: int) -> None:
    """It makes optimizer state; what follows begins with it."""
    model, inputs = mlp()
    stream = fake_run(model, inputs, Steps(count=1, optimizer=adamw))
    assert stream.repeated(count) is None


def test_a_cache_that_is_emptied_between_steps_is_not_reused() -> None:
    """Longer batches after shorter ones: what the short ones left is given back, or stands by."""
    model, inputs = mlp()
    whole = fake_run(model, inputs, Steps(count=2, optimizer=adamw))
    growing = EventStream(
        tuple(a._replace(nbytes=a.nbytes * 30_000) for a in whole.allocations), whole.events
    ).scaled({0: 0.5})
    sums = {0: 0, 1: 0}
    for found in growing.allocations:
        if found.category == "activations":
            sums[found.step] += found.nbytes
    assert 2 * sums[0] == sums[1] > 0
    kept, emptied = replay(growing), replay(growing, emptied=(1,))
    assert emptied.peak_allocated == kept.peak_allocated
    assert emptied.peak_allocated <= emptied.peak_reserved < kept.peak_reserved


def test_memory_that_a_parameter_gives_up_is_free() -> None:
    """An optimizer that puts a new tensor in ``p.data`` holds no old one."""

    class Rebinding(Optimizer):
        def __init__(self, params: Any) -> None:
            super().__init__(params, {})

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for parameter in self.param_groups[0]["params"]:
                parameter.data = parameter.data - 0.1 * parameter.grad

    model = nn.Linear(1024, 1024, bias=False)
    estimate = estimate_memory(model, torch.empty(1, 1024, device="meta"), optimizer=Rebinding)
    ends = [p.end_allocated for p in estimate.timeline if p.phase == "optimizer"]
    # The weight, its gradient, and cuBLAS's two workspaces.
    assert ends[-1] == pytest.approx(8 * MIB + 2 * 8_519_680, abs=MIB)


def test_operators_made_of_others_are_seen_in_inference_mode() -> None:
    """There nobody takes them apart before; what their parts allocate is told all the same."""
    found = []
    for context in (torch.no_grad, torch.inference_mode):
        recorder = Recorder()
        data, seen = torch.rand(2, 4, 8, 16), torch.ones(8, 16, dtype=torch.bool)
        with recorder, context():
            mixed = torch.einsum("...qk,...kd->...qd", data, data.transpose(-1, -2))
            mixed.transpose(1, 2).flatten(2).contiguous()
            torch.where(seen, data, -torch.inf)
        found.append([(each.operation, each.nbytes) for each in recorder.close().allocations])
    assert found[0] == found[1]
    assert ("aten.clone", 2 * 4 * 8 * 8 * 4) in found[0]


def test_what_grows_is_not_repeated() -> None:
    """A step that leaves more than it found is not like the next."""
    allocations = tuple(Allocation(8, "temporaries", "", "", "forward", step) for step in (0, 1))
    events = tuple(Event(i, is_alloc=True, phase="forward", step=i) for i in (0, 1))
    assert EventStream(allocations, events).repeated(1) is None


def test_the_collector_leaves_old_objects_alone() -> None:
    """Garbage made inside is collected; objects that others froze stay frozen."""
    import gc
    import weakref

    from freezekit._collector import collector_of_new_objects

    class Node:
        pass

    own = gc.get_freeze_count()  # CPython 3.12 has some
    with collector_of_new_objects():
        assert gc.get_freeze_count() > 10_000
        node: Any = Node()
        node.itself = node
        gone = weakref.ref(node)
        del node
        gc.collect()
        assert gone() is None
    assert gc.get_freeze_count() <= own
    gc.freeze()
    try:
        before = gc.get_freeze_count()
        with collector_of_new_objects():
            pass
        assert gc.get_freeze_count() == before
    finally:
        gc.unfreeze()
