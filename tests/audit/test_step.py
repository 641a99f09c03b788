"""audit_step: everything is put back, to the bit; what it is given, and what it tells."""

from __future__ import annotations

import copy
import gc
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LinearLR

import freezekit as fk
from audit_support import codes, find, freeze_by_hand
from freezekit._audit.step.digest import digest, same_bits


class Net(nn.Module):
    """Norms with statistics, dropout, a frozen part, a buffer that is not saved."""

    count: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(3, 4).requires_grad_(False)
        self.norm = nn.BatchNorm1d(4)
        self.drop = nn.Dropout(0.5)
        self.head = nn.Linear(4, 2)
        self.register_buffer("count", torch.zeros((), dtype=torch.long), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count = self.count + 1
        found: torch.Tensor = self.head(self.drop(self.norm(self.stem(x))))
        return found


def everything(model: nn.Module, optimizers: list[Optimizer]) -> list[Any]:
    """All that a step can change: values to the bit, identities, random states."""
    found: list[Any] = []
    for name, tensor in (
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ):
        found += [name, id(tensor), tensor.data_ptr(), tensor.detach().clone()]
    for parameter in model.parameters():
        grad = parameter.grad
        found += [parameter.requires_grad, id(grad), None if grad is None else grad.clone()]
    for module in model.modules():
        found += [id(module), module.training, id(vars(module).get("train"))]
        found += [len(module._forward_hooks), len(module._forward_pre_hooks)]
    for parameter in model.parameters():
        found.append(len(parameter._backward_hooks or ()))
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            found += [{k: copy.deepcopy(v) for k, v in group.items() if k != "params"}]
            found += [id(tensor) for tensor in group["params"]]
        found += [(id(key), copy.deepcopy(value)) for key, value in optimizer.state.items()]
    numbers: Any = np.random.get_state()  # noqa: NPY002  # the old state is what has to be put back
    found += [torch.get_rng_state(), random.getstate(), numbers[1].tobytes(), numbers[2]]
    return found


def assert_same(one: Any, other: Any) -> None:
    """Alike to the bit, however deep."""
    assert type(one) is type(other)
    if isinstance(one, torch.Tensor):
        assert same_bits(one, other)
    elif isinstance(one, dict):
        assert list(one) == list(other)
        for key in one:
            assert_same(one[key], other[key])
    elif isinstance(one, list | tuple):
        assert len(one) == len(other)
        for a, b in zip(one, other, strict=True):
            assert_same(a, b)
    else:
        assert one == other


def violent_step(model: Net, optimizer: Optimizer) -> Callable[[], None]:
    """A step that changes all that can be changed."""

    def step() -> None:
        model.eval()
        model.train()
        optimizer.zero_grad()
        model(torch.randn(6, 3)).pow(2).mean().backward()
        random.random()
        np.random.rand()  # noqa: NPY002
        optimizer.step()
        optimizer.param_groups[0]["lr"] *= 0.5
        with torch.no_grad():
            model.stem.weight.add_(1)
            model.norm.get_buffer("running_mean").fill_(3)
        model.stem.bias.data = torch.ones(4)
        model.stem.requires_grad_(True)
        model.head.weight = nn.Parameter(torch.ones(2, 4))
        model.extra = nn.Linear(1, 1)
        model.drop.eval()

    return step


OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.1, amsgrad=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "LBFGS": lambda p: torch.optim.LBFGS(p, lr=0.1),
    "capturable-lr": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.1), foreach=False),
}


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("given", [True, False], ids=["given", "not-given"])
def test_everything_is_put_back(
    make: Callable[[list[nn.Parameter]], Optimizer], steps: int, given: bool
) -> None:
    """Values, gradients, flags, modes, registrations, optimizer, random states: to the bit."""
    model = Net()
    optimizer = make([p for p in model.parameters() if p.requires_grad])
    for _ in range(steps):
        model(torch.randn(6, 3)).pow(2).mean().backward()
        optimizer.step(lambda: 0.0)
    fk.freeze(model, "stem")
    before = everything(model, [optimizer])
    step = violent_step(model, optimizer)
    if isinstance(optimizer, torch.optim.LBFGS):

        def step() -> None:
            lbfgs: Any = optimizer
            lbfgs.step(lambda: model(torch.ones(6, 3)).pow(2).mean())
            violent_step(model, torch.optim.SGD(model.parameters(), lr=0.1))()

    report = fk.audit_step(model, step, optimizer=optimizer if given else None)
    assert_same(before, everything(model, [optimizer]))
    assert report.step is not None
    assert report.step.restored


def test_a_step_that_raises_is_put_back_too() -> None:
    """The error is a finding; what was changed until then is undone."""
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = everything(model, [optimizer])

    def step() -> None:
        model(torch.randn(6, 3)).pow(2).mean().backward()
        optimizer.step()
        raise ValueError("the loader is empty")

    finding = find(fk.audit_step(model, step), "FK801")
    assert finding.cause == "ValueError: the loader is empty"
    assert_same(before, everything(model, [optimizer]))


def test_an_interrupt_goes_through_and_all_is_put_back() -> None:
    """Ctrl-C is not swallowed."""
    model = Net()
    before = everything(model, [])

    def step() -> None:
        model(torch.randn(6, 3)).pow(2).mean().backward()
        raise KeyboardInterrupt("on purpose")

    with pytest.raises(KeyboardInterrupt, match="on purpose"):
        fk.audit_step(model, step)
    assert_same(before, everything(model, []))


def test_it_may_be_kept() -> None:
    """With after="keep" the model is as the step left it; hooks are gone all the same."""
    model = Net()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    twin, weight = copy.deepcopy(model), model.head.weight.detach().clone()
    other = torch.optim.SGD([p for p in twin.parameters() if p.requires_grad], lr=0.1)

    def run(net: Net, update: Optimizer) -> None:
        torch.manual_seed(0)
        net(torch.randn(6, 3)).pow(2).mean().backward()
        update.step()

    report = fk.audit_step(model, lambda: run(model, optimizer), after="keep")
    run(twin, other)
    assert not torch.equal(model.head.weight, weight)
    for (name, one), two in zip(
        model.state_dict().items(), twin.state_dict().values(), strict=True
    ):
        assert torch.equal(one, two), name
    assert not model.head._forward_hooks
    assert report.step is not None
    assert not report.step.restored
    assert "left as it is after the step" in " ".join(str(report).split())


def test_a_scheduler_in_the_step() -> None:
    """Its learning rate is put back with the groups."""
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = LinearLR(optimizer)
    rate = optimizer.param_groups[0]["lr"]

    def step() -> None:
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        scheduler.step()

    fk.audit_step(model, step)
    assert optimizer.param_groups[0]["lr"] == rate


def test_the_users_own_hooks_stay_and_run_once() -> None:
    """Hooks that are there run as they would, and are there afterwards."""
    model = nn.Linear(3, 1)
    calls: list[str] = []
    model.register_forward_hook(lambda *_: calls.append("forward"))
    model.weight.register_hook(lambda grad: calls.append("backward"))  # type: ignore[no-untyped-call]
    fk.audit_step(model, lambda: model(torch.ones(1, 3)).sum().backward())
    assert calls == ["forward", "backward"]
    assert len(model._forward_hooks) == 1


def test_watching_changes_no_number() -> None:
    """The step computes to the bit what it computes alone."""
    model = Net()

    def gradients() -> list[torch.Tensor]:
        torch.manual_seed(3)
        model.zero_grad()
        model(torch.randn(6, 3)).pow(2).mean().backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    alone = gradients()
    model.zero_grad()
    seen: list[torch.Tensor] = []
    fk.audit_step(model, lambda: seen.extend(gradients()))
    assert all(torch.equal(one, two) for one, two in zip(alone, seen, strict=True))


# -- snapshot="hash" ---------------------------------------------------------------------------


def test_a_hash_takes_less_and_still_finds() -> None:
    """Frozen parameters are not copied; that one changed is found, and said to be lost."""
    model = nn.Sequential(nn.Linear(300, 300), nn.Linear(300, 2))
    freeze_by_hand(model[0])

    def quiet() -> None:
        model(torch.ones(1, 300)).sum().backward()

    def loud() -> None:
        quiet()
        with torch.no_grad():
            model.get_parameter("0.weight")[7, 9] += 1e-3

    copied = fk.audit_step(model, quiet).step
    hashed = fk.audit_step(model, quiet, snapshot="hash").step
    assert copied is not None
    assert hashed is not None
    assert copied.snapshot_bytes == 4 * sum(p.numel() for p in model.parameters())
    assert hashed.snapshot_bytes < 0.05 * copied.snapshot_bytes
    assert hashed.restored
    before = model.get_parameter("0.weight").detach().clone()
    report = fk.audit_step(model, loud, snapshot="hash")
    finding = find(report, "FK821")
    assert finding.fqns == ("0.weight",)
    assert "1 could not be put back (snapshot='hash')" in finding.cause
    assert report.step is not None
    assert not report.step.restored
    assert not torch.equal(model.get_parameter("0.weight"), before)


@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int8, torch.complex64],
    ids=str,
)
def test_a_digest_sees_every_change(dtype: torch.dtype) -> None:
    """One element, a permutation, a sign of zero: all change the digest."""
    torch.manual_seed(0)
    tensor = torch.randn(3000).mul(50).to(dtype)
    reference = digest(tensor)
    assert torch.equal(digest(tensor.clone()), reference)
    for index in (0, 1023, 1024, 2999):
        other = tensor.clone()
        other[index] = other[index] + 1 if dtype.is_floating_point else other[index] * 0 + 3
        assert same_bits(other, tensor) is torch.equal(digest(other), reference)
    swapped = tensor.clone()
    swapped[[5, 6]] = swapped[[6, 5]]
    assert same_bits(swapped, tensor) or not torch.equal(digest(swapped), reference)


def test_bits_are_compared_not_values() -> None:
    """NaN is like itself, and minus zero is not zero."""
    nan = torch.tensor([float("nan"), 1.0])
    assert same_bits(nan, nan.clone())
    assert not same_bits(torch.tensor([0.0]), torch.tensor([-0.0]))
    assert not same_bits(torch.zeros(2), torch.zeros(2, dtype=torch.float64))


# -- what it is given --------------------------------------------------------------------------


async def coroutine() -> None:
    """Does not run when it is called."""


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (3, r"^step: expected a function without arguments .*, got int$"),
        (lambda batch: None, r"needs batch; pass lambda: step\(batch\)$"),
        (lambda batch, scale: None, r"needs batch, scale; pass lambda: step\(batch, scale\)$"),
        (coroutine, r"^step: expected a plain function; a generator or coroutine"),
    ],
    ids=["number", "argument", "arguments", "coroutine"],
)
def test_what_is_no_step(step: Any, message: str) -> None:
    """A clear error, before anything is run."""
    with pytest.raises(TypeError, match=message):
        fk.audit_step(nn.Linear(1, 1), step)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"snapshot": "none"}, r"^snapshot: expected 'copy' or 'hash', got 'none'$"),
        ({"after": True}, r"^after: expected 'restore' or 'keep', got True$"),
        ({"ignore": "FK999"}, r"^ignore: expected codes such as 'FK203', got 'FK999'$"),
    ],
    ids=["snapshot", "after", "ignore"],
)
def test_unknown_options(options: dict[str, Any], message: str) -> None:
    """Values that are none of the options are told."""
    with pytest.raises(ValueError, match=message):
        fk.audit_step(nn.Linear(1, 1), lambda: None, **options)


def test_uninitialised_parameters_are_refused() -> None:
    """What they were could not be put back."""
    with pytest.raises(fk.errors.UnsupportedModelError, match=r"'weight' is not initialised yet"):
        fk.audit_step(nn.LazyLinear(2), lambda: None)


def test_codes_of_steps_can_be_ignored() -> None:
    """As those of static checks."""
    model = nn.ModuleDict({"body": nn.Linear(3, 1), "rest": nn.Linear(3, 1)})

    def step() -> None:
        model["body"](torch.ones(1, 3)).sum().backward()

    assert codes(fk.audit_step(model, step)) == ["FK807"]
    assert codes(fk.audit_step(model, step, ignore="FK807")) == []


def test_a_check_of_ones_own_sees_the_step() -> None:
    """``context.step`` has what was seen."""
    model = nn.Linear(3, 1)
    seen = []

    def look(context: fk.AuditContext) -> Any:
        """MY001: looks."""
        seen.append(context.step is not None and sorted(context.step.gradients))
        return ()

    fk.audit_step(model, lambda: model(torch.ones(1, 3)).sum().backward(), checks=(look,))
    fk.audit(model, checks=(look,))
    assert seen == [[0, 1], False]


# -- what it tells -----------------------------------------------------------------------------


def four_combinations(no_grad: bool, trains: bool) -> fk.AuditReport:
    """BERT below a recurrent head, small: with or without no_grad, frozen or not."""
    from transformers import BertConfig, BertModel

    class Sentiment(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bert = BertModel(
                BertConfig(
                    vocab_size=11,
                    hidden_size=8,
                    num_hidden_layers=2,
                    num_attention_heads=2,
                    intermediate_size=16,
                    max_position_embeddings=8,
                )
            )
            self.rnn = nn.GRU(8, 4, batch_first=True)
            self.out = nn.Linear(4, 1)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            if no_grad:
                with torch.no_grad():
                    features = self.bert(ids)[0]
            else:
                features = self.bert(ids)[0]
            found: torch.Tensor = self.out(self.rnn(features)[1][-1])
            return found

    torch.manual_seed(0)
    model = Sentiment().train()
    model.bert.requires_grad_(trains)
    optimizer = torch.optim.Adam(model.parameters())
    ids = torch.tensor([[1, 2, 3], [4, 5, 6]])

    def step() -> None:
        optimizer.zero_grad()
        model(ids).pow(2).mean().backward()
        optimizer.step()

    return fk.audit_step(model, step, optimizer=optimizer, ignore="FK203")


def test_combination_b_is_told() -> None:
    """All of BERT's tensors are marked trainable and cannot receive a gradient; DDP would raise."""
    finding = find(four_combinations(no_grad=True, trains=True), "FK803")
    assert finding.severity == "error"
    assert len(finding.fqns) == 5 + 2 * 16 + 2  # embeddings and norm, two layers, pooler
    assert finding.cause.startswith("39 tensors (")
    assert (
        "marked trainable that cannot receive a gradient, because bert runs under" in finding.cause
    )
    assert "DistributedDataParallel would raise" in finding.cause
    assert 'freezekit.freeze(model, "bert")' in finding.mend


@pytest.mark.parametrize("no_grad", [True, False], ids=["a", "c"])
def test_combinations_a_and_c_are_in_order(no_grad: bool) -> None:
    """A frozen BERT is in order, with no_grad or without."""
    assert four_combinations(no_grad=no_grad, trains=False).ok


def test_combination_d_has_a_pooler_that_nothing_uses() -> None:
    """Even with all of it trainable, the pooler learns nothing."""
    report = four_combinations(no_grad=False, trains=True)
    finding = find(report, "FK807")
    assert finding.fqns == ("bert.pooler.dense.weight", "bert.pooler.dense.bias")
    assert codes(report) == ["FK807"]


def test_it_is_true_that_ddp_raises(tmp_path: Path) -> None:
    """What FK803 says of DistributedDataParallel is what it does."""
    store = f"file://{tmp_path}/store"
    dist.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    try:

        class Combination(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.backbone, self.head = nn.Linear(3, 3), nn.Linear(3, 1)

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                with torch.no_grad():
                    features = self.backbone(x)
                found: torch.Tensor = self.head(features)
                return found

        model = nn.parallel.DistributedDataParallel(Combination())
        model(torch.ones(2, 3)).sum().backward()
        with pytest.raises(RuntimeError, match="Expected to have finished reduction"):
            model(torch.ones(2, 3))
    finally:
        dist.destroy_process_group()


def test_alternating_flags_inside_a_step() -> None:
    """What learns at some moment of the step is not frozen, and may move."""
    model = nn.ModuleDict({"one": nn.Linear(3, 1), "two": nn.Linear(3, 1)})
    model["two"].requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        model["one"](torch.ones(1, 3)).sum().backward()
        model["two"].requires_grad_(True)
        model["two"](torch.ones(1, 3)).sum().backward()
        optimizer.step()
        model["two"].requires_grad_(False)

    report = fk.audit_step(model, step)
    assert "FK821" not in codes(report)
    assert not model["two"].weight.requires_grad


def test_gradients_that_the_step_clears_are_seen() -> None:
    """``zero_grad`` at the end of a step hides nothing."""
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    report = fk.audit_step(model, step)
    assert codes(report) == []
    assert report.step is not None
    assert (report.step.gradients, report.step.optimizer_steps) == (2, 1)


def test_an_optimizer_that_was_not_given_is_checked() -> None:
    """An optimizer that steps is seen, and found to be out of step with the model."""
    model = nn.ModuleDict({"body": nn.Linear(3, 3), "head": nn.Linear(3, 1)})
    optimizer = torch.optim.SGD(model["head"].parameters(), lr=0.1)

    def step() -> None:
        model["head"](model["body"](torch.ones(1, 3))).sum().backward()
        optimizer.step()

    assert {"FK303", "FK831"} <= set(codes(fk.audit_step(model, step)))


def test_sparse_gradients() -> None:
    """Gradients of an embedding with ``sparse=True`` are read as they are."""
    model = nn.Sequential(nn.Embedding(5, 3, sparse=True), nn.Linear(3, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        model(torch.tensor([1, 2])).sum().backward()
        optimizer.step()

    assert codes(fk.audit_step(model, step)) == []


def test_attention_whose_projection_is_never_called() -> None:
    """MultiheadAttention uses its output projection's parameters itself: not unused."""
    model = nn.MultiheadAttention(4, 2, batch_first=True)

    def step() -> None:
        x = torch.randn(2, 3, 4)
        model(x, x, x)[0].pow(2).sum().backward()

    assert codes(fk.audit_step(model, step)) == []


def test_lora_at_its_first_step_is_a_note() -> None:
    """B is zero, so A's first gradient is: by design."""

    class Lora(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(3, 2, bias=False), nn.Linear(2, 3, bias=False)
            nn.init.zeros_(self.b.weight)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = self.b(self.a(x))
            return found

    model = Lora()
    finding = find(fk.audit_step(model, lambda: model(torch.ones(1, 3)).sum().backward()), "FK811")
    assert (finding.severity, finding.fqns) == ("note", ("a.weight",))
    assert "1 weight initialised with zeros, which learns (b.weight)" in finding.cause


def test_an_output_kept_in_a_variable_is_a_note() -> None:
    """A variable is overwritten at the next step; a list grows."""
    model = nn.Linear(3, 2)
    kept: dict[str, Any] = {}

    def step() -> None:
        step.output = model(torch.ones(1, 3))  # type: ignore[attr-defined]
        step.output.sum().backward()  # type: ignore[attr-defined]

    assert "FK841" in codes(fk.audit_step(model, step))
    del step.output  # type: ignore[attr-defined]

    def detached() -> None:
        output = model(torch.ones(1, 3))
        kept["output"] = output.detach()
        output.sum().backward()

    assert "FK841" not in codes(fk.audit_step(model, detached))


def test_losses_in_a_list_keep_their_graphs() -> None:
    """The classic leak: a list, or a running sum, of losses; numbers keep nothing."""
    model = nn.Linear(3, 1)
    losses: list[Any] = []

    def step() -> torch.Tensor:
        loss: torch.Tensor = model(torch.ones(1, 3)).sum()
        torch.autograd.backward(loss)
        return loss

    finding = find(fk.audit_step(model, lambda: losses.append(step())), "FK841")
    assert (finding.severity, finding.fqns) == ("warning", ())
    assert "1 tensor ([]) still alive with a graph, in a list." in finding.cause
    losses.clear()
    assert "FK841" not in codes(fk.audit_step(model, lambda: losses.append(step().item())))
    assert "FK841" not in codes(fk.audit_step(model, step))


def test_what_was_kept_before_is_not_the_steps() -> None:
    """A loss of an earlier step in a variable is no finding."""
    model = nn.Linear(3, 1)
    earlier = model(torch.ones(1, 3)).sum()
    report = fk.audit_step(model, lambda: model(torch.ones(1, 3)).sum().backward())
    assert earlier.grad_fn is not None
    assert "FK841" not in codes(report)


@pytest.mark.parametrize("generation", [0, 1, 2])
def test_kept_graphs_are_seen_past_the_garbage_collector(generation: int) -> None:
    """A collection in the middle of the step ages what was made, and what was there before."""
    model = nn.Linear(3, 1)
    losses = [model(torch.ones(1, 3)).sum()]

    def step() -> None:
        losses.append(model(torch.ones(1, 3)).sum())
        gc.collect(generation)
        losses[-1].backward()

    callbacks = list(gc.callbacks)
    finding = find(fk.audit_step(model, step), "FK841")
    assert "1 tensor ([]) still alive with a graph, in a list." in finding.cause
    assert gc.callbacks == callbacks
    losses.clear()
    finding = find(fk.audit_step(model, step), "FK841")
    assert "1 tensor ([]) still alive" in finding.cause


def test_where_an_error_was_raised() -> None:
    """The innermost module in whose forward it was, or none if it was outside of all."""
    model = nn.Sequential(nn.Sequential(nn.Linear(3, 2)), nn.Linear(4, 1))
    finding = find(fk.audit_step(model, lambda: model(torch.ones(1, 3))), "FK801")
    assert finding.fqns == ("1",)
    assert finding.cause.startswith("RuntimeError in 1: mat1 and mat2 shapes cannot be multiplied")
    model = nn.Sequential(nn.Linear(3, 1)).requires_grad_(False)
    finding = find(fk.audit_step(model, lambda: model(torch.ones(1, 3)).sum().backward()), "FK801")
    assert finding.fqns == ()
    assert "freezekit.unfreeze" in finding.mend


def test_memory_that_runs_out_before_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error says what would take less, and nothing was run."""

    def fail(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr("freezekit._audit.step.driver.SavedState", fail)
    with pytest.raises(torch.OutOfMemoryError, match=r"CUDA out of memory") as caught:
        fk.audit_step(nn.Linear(1, 1), lambda: pytest.fail("it was run"))
    assert "snapshot='hash'" in caught.value.__notes__[0]


def test_broken_views_elsewhere_in_the_process_do_no_harm() -> None:
    """Some views may not be asked for their graph: they are none of the step's."""
    base = torch.ones(2, 3, requires_grad=True) * 1
    views = base.unbind()
    with torch.no_grad():
        base.mul_(2)
    with pytest.raises(RuntimeError, match="view"):
        _ = views[0].grad_fn
    model = nn.Linear(3, 1)
    assert codes(fk.audit_step(model, lambda: model(torch.ones(1, 3)).sum().backward())) == []
