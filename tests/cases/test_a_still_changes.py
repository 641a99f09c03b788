"""Group A: "frozen", yet something still changes: first the trap, then the right outcome."""

from __future__ import annotations

import copy
import io
import warnings
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

import freezekit
from freezekit import audit, freeze, freeze_state, frozen, select, train_only, unfreeze
from freezekit.errors import OptimizerError, UnmatchedPatternError

Values: TypeAlias = dict[str, torch.Tensor]


def values_of(module: nn.Module) -> Values:
    """All parameters and saved buffers, as they are now."""
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


def moved(module: nn.Module, before: Values) -> list[str]:
    """Names of what is not, bit for bit, what it was."""
    now = module.state_dict()
    assert list(now) == list(before)
    return [name for name, value in now.items() if not torch.equal(value, before[name])]


def train_epochs(model: nn.Module, optimizer: Optimizer, x: torch.Tensor, epochs: int = 3) -> None:
    """What a training script does: train(), a step, and a validation in eval() each epoch."""
    for _ in range(epochs):
        model.train()
        optimizer.zero_grad()
        model(x).pow(2).mean().backward()
        optimizer.step()
        model.eval()
        with torch.no_grad():
            model(x)
    model.train()


def sgd(model: nn.Module) -> Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)


class Net(nn.Module):
    """A backbone and a head."""

    def __init__(self, backbone: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.backbone = backbone
        self.head = head

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.head(self.backbone(x))
        return found


# -- B1, B2, B4: running statistics ------------------------------------------------------------


class RunningMean(nn.Module):
    """A user's own layer with statistics, of no class that anyone could list."""

    average: torch.Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))
        self.register_buffer("average", torch.zeros(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.average.lerp_(x.detach().mean(0), 0.5)
        return (x - self.average) * self.scale


def flat_net(norm: nn.Module) -> tuple[Net, torch.Tensor]:
    return Net(nn.Sequential(nn.Linear(2, 3), norm), nn.Linear(3, 1)), torch.randn(6, 2) + 5


def spatial_net(norm: nn.Module, dims: int) -> tuple[Net, torch.Tensor]:
    conv = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1](2, 3, 1)
    head = nn.Sequential(nn.Flatten(), nn.Linear(3 * 2**dims, 1))
    return Net(nn.Sequential(conv, norm), head), torch.randn(4, 2, *[2] * dims) + 5


def spectral_linear() -> nn.Module:
    layer = nn.utils.parametrizations.spectral_norm(nn.Linear(3, 3))
    # It begins with its vectors settled: another weight makes them move.
    nn.init.normal_(layer.get_parameter("parametrizations.weight.original"))
    return layer


STATISTICS: dict[str, Callable[[], tuple[Net, torch.Tensor]]] = {
    "BatchNorm1d": lambda: flat_net(nn.BatchNorm1d(3)),
    "BatchNorm1d-affine=False": lambda: flat_net(nn.BatchNorm1d(3, affine=False)),
    "BatchNorm1d-momentum=None": lambda: flat_net(nn.BatchNorm1d(3, momentum=None)),
    "BatchNorm2d": lambda: spatial_net(nn.BatchNorm2d(3), 2),
    "BatchNorm2d-affine=False": lambda: spatial_net(nn.BatchNorm2d(3, affine=False), 2),
    "BatchNorm3d": lambda: spatial_net(nn.BatchNorm3d(3), 3),
    "SyncBatchNorm": lambda: spatial_net(nn.SyncBatchNorm(3), 2),
    "InstanceNorm1d": lambda: spatial_net(nn.InstanceNorm1d(3, track_running_stats=True), 1),
    "InstanceNorm2d-affine": lambda: spatial_net(
        nn.InstanceNorm2d(3, affine=True, track_running_stats=True), 2
    ),
    "InstanceNorm3d": lambda: spatial_net(nn.InstanceNorm3d(3, track_running_stats=True), 3),
    "spectral_norm-hook": lambda: flat_net(nn.utils.spectral_norm(nn.Linear(3, 3))),
    "spectral_norm-parametrisation": lambda: flat_net(spectral_linear()),
    "own-module": lambda: flat_net(RunningMean(3)),
}
statistics = pytest.mark.parametrize("make", STATISTICS.values(), ids=STATISTICS.keys())


@statistics
def test_frozen_backbone_keeps_its_statistics_and_features(
    make: Callable[[], tuple[Net, torch.Tensor]],
) -> None:
    """A frozen backbone is bit for bit what it was after training the head (B1)."""
    net, x = make()
    plain = copy.deepcopy(net.backbone).requires_grad_(False)
    before = values_of(plain)
    plain.train()(x)
    assert moved(plain, before)

    before = values_of(net.backbone)
    features = net.eval().backbone(x)
    head = values_of(net.head)
    assert len(freeze(net, "backbone").held) == 1
    train_epochs(net, sgd(net), x)
    assert moved(net.backbone, before) == []
    assert torch.equal(net.backbone(x), features)
    assert moved(net.head, head)


@statistics
def test_unfrozen_statistics_move_again(make: Callable[[], tuple[Net, torch.Tensor]]) -> None:
    """Unfreezing gives the backbone its training mode back, and its statistics move (B1)."""
    net, x = make()
    modes = [module.training for module in net.modules()]
    held = freeze(net, "backbone").held
    net.eval().train()
    before = values_of(net.backbone)
    assert unfreeze(net, "backbone").released == held
    assert [module.training for module in net.modules()] == modes
    with torch.no_grad():
        net(x)
    assert moved(net.backbone, before)


@statistics
def test_audit_finds_moving_statistics(make: Callable[[], tuple[Net, torch.Tensor]]) -> None:
    """An audit tells statistics that move in a part frozen by hand, and freeze mends it (B1)."""
    net, _ = make()
    net.backbone.requires_grad_(False)
    (finding,) = [f for f in audit(net).findings if f.code in ("FK201", "FK202")]
    assert all(fqn.startswith("backbone.") for fqn in finding.fqns)
    freeze(net, "backbone")
    net.train()
    assert audit(net).findings == ()


def save_and_load(model: Net) -> Net:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded: Net = torch.load(file, weights_only=False)
    return loaded


@pytest.mark.parametrize("carry", [copy.deepcopy, save_and_load], ids=["deepcopy", "torch.save"])
def test_copies_keep_their_statistics(carry: Callable[[Net], Net]) -> None:
    """The hold goes with a copy, and is the copy's own (B1)."""
    net, x = flat_net(nn.BatchNorm1d(3))
    freeze(net, "backbone")
    twin = carry(net)
    before = values_of(twin.backbone)
    train_epochs(twin, sgd(twin), x)
    assert moved(twin.backbone, before) == []
    unfreeze(net, "backbone")
    assert [m.training for m in net.train().modules()] == [True] * 5
    assert [m.training for m in twin.train().modules()].count(False) == 1


@pytest.mark.parametrize("affine", [True, False])
def test_a_norm_can_be_the_whole_model(affine: bool) -> None:
    """A model that is nothing but a norm, with or without parameters, is held (B1)."""
    norm = nn.BatchNorm1d(3, affine=affine)
    before = values_of(norm)
    freeze(norm)
    norm.train()(torch.randn(6, 3) + 5)
    assert moved(norm, before) == []


class FlatNet(nn.Module):
    """A norm without parameters right between what is frozen and what learns."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(2, 3)
        self.norm = nn.BatchNorm1d(3, affine=False)
        self.head = nn.Linear(3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.head(self.norm(self.body(x)))
        return found


@pytest.mark.parametrize(
    "call",
    [
        pytest.param(lambda m: freeze(m, ["body", "norm"]), id="names"),
        pytest.param(lambda m: freeze(m, ["body", "no*"]), id="glob"),
        pytest.param(lambda m: freeze(m, ["body", "type:BatchNorm1d"]), id="type"),
        pytest.param(lambda m: freeze(m, ["body", nn.BatchNorm1d]), id="class"),
        pytest.param(lambda m: freeze(m, exclude="head"), id="exclude"),
        pytest.param(lambda m: train_only(m, "head"), id="train_only"),
    ],
)
def test_norm_without_parameters_is_held_where_it_is_meant(
    call: Callable[[nn.Module], freezekit.FreezeReport],
) -> None:
    """A norm that has no parameter to freeze is held when the patterns cover it (B1)."""
    model = FlatNet()
    assert call(model).held == ("norm",)
    before = values_of(model.norm)
    train_epochs(model, sgd(model), torch.randn(6, 2) + 5)
    assert moved(model.norm, before) == []


def test_norm_without_parameters_is_not_held_where_it_is_excluded() -> None:
    """A norm that is excluded by its name is not held, though all around it is frozen (B1)."""
    model = Net(nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3, affine=False)), nn.Linear(3, 1))
    assert freeze(model, "backbone", exclude="backbone.1").held == ()


@pytest.mark.parametrize(
    "call",
    [
        pytest.param(lambda m: freeze(m, "*.weight"), id="freeze"),
        pytest.param(lambda m: train_only(m, "*.bias"), id="train_only"),
        pytest.param(lambda m: freeze(m, "backbone", exclude="*.bias"), id="exclude"),
    ],
)
def test_norm_that_learns_in_part_is_not_held(
    call: Callable[[nn.Module], freezekit.FreezeReport],
) -> None:
    """A norm of which the bias still learns is in training, and stays in train mode (B1)."""
    net, x = flat_net(nn.BatchNorm1d(3))
    assert call(net).held == ()
    before = values_of(net)
    train_epochs(net, sgd(net), x)
    norm = {name for name in moved(net, before) if name.startswith("backbone.1.")}
    assert norm == {
        f"backbone.1.{name}"
        for name in ("bias", "running_mean", "running_var", "num_batches_tracked")
    }


def test_affine_parameters_of_a_norm_in_eval_are_frozen_too() -> None:
    """eval() alone holds a norm's statistics only; freeze holds its weights as well (B2)."""
    norm = nn.BatchNorm1d(3)
    plain = Net(copy.deepcopy(norm), nn.Linear(3, 1))
    plain.backbone.eval()
    before = values_of(plain.backbone)
    optimizer = sgd(plain)
    plain(torch.randn(4, 3)).pow(2).sum().backward()
    optimizer.step()
    assert moved(plain.backbone, before) == ["weight", "bias"]

    net = Net(norm, nn.Linear(3, 1))
    before = values_of(norm)
    freeze(net, "backbone")
    train_epochs(net, sgd(net), torch.randn(4, 3) + 5)
    assert moved(norm, before) == []


def test_statistics_can_be_left_alone() -> None:
    """norm_stats="keep" freezes weights, and leaves statistics to the training mode (B2)."""
    net, x = flat_net(nn.BatchNorm1d(3))
    before = values_of(net.backbone)
    assert freeze(net, "backbone", norm_stats="keep").held == ()
    train_epochs(net, sgd(net), x)
    statistic = ["1.running_mean", "1.running_var", "1.num_batches_tracked"]
    assert moved(net.backbone, before) == statistic


def test_track_running_stats_switched_off_is_held_too() -> None:
    """In train mode too, a frozen norm normalises with its statistics, not the batch's (B4)."""
    norm = nn.BatchNorm1d(3)
    norm(torch.randn(50, 3) * 5 + 2)
    norm.track_running_stats = False
    x = torch.randn(8, 3)
    assert not torch.allclose(norm.train()(x), norm.eval()(x))

    expected = norm.eval()(x)
    freeze(norm)
    assert torch.equal(norm.train()(x), expected)


def test_norm_without_statistics_is_not_held() -> None:
    """What has no statistics gives the same in both modes: there is nothing to hold (B4)."""
    norm = nn.BatchNorm1d(3, track_running_stats=False)
    x = torch.randn(8, 3)
    assert freeze(norm).held == ()
    assert torch.equal(norm.train()(x), norm.eval()(x))


# -- B5, B6: modes -----------------------------------------------------------------------------


def test_train_does_not_undo_the_hold() -> None:
    """model.train() brings a frozen part back into train mode, but not what is held (B5)."""
    net, _ = flat_net(nn.BatchNorm1d(3))
    net.backbone.requires_grad_(False).eval()
    net.train()
    assert all(module.training for module in net.backbone.modules())

    freeze(net, "backbone")
    for _ in range(3):
        assert net.eval() is net
        assert net.train() is net
        assert [name for name, m in net.named_modules() if not m.training] == ["backbone.1"]
    norm = net.get_submodule("backbone.1")
    assert norm.train() is norm
    assert not norm.training


def test_mode_asked_for_while_held_comes_back() -> None:
    """A model frozen in eval mode and trained since is in train mode when unfrozen (B5)."""
    net, _ = flat_net(nn.BatchNorm1d(3))
    freeze(net.eval(), "backbone")
    net.train()
    unfreeze(net, "backbone")
    assert net.get_submodule("backbone.1").training


RANDOM_LAYERS: dict[str, Callable[[], nn.Module]] = {
    "Dropout": lambda: nn.Dropout(0.5),
    "Dropout1d": lambda: nn.Dropout1d(0.5),
    "AlphaDropout": lambda: nn.AlphaDropout(0.5),
    "RReLU": nn.RReLU,
}


@pytest.mark.parametrize("make", RANDOM_LAYERS.values(), ids=RANDOM_LAYERS.keys())
def test_audit_finds_active_random_layers(make: Callable[[], nn.Module]) -> None:
    """A frozen encoder with a random layer in train mode is noisy, and audit says so (B6)."""
    net = Net(nn.Sequential(nn.Linear(8, 8), make()), nn.Linear(8, 1))
    freeze(net, "backbone")
    x = torch.randn(4, 8)
    with torch.no_grad():
        assert not torch.equal(net.backbone(x), net.backbone(x))

    (finding,) = audit(net).findings
    assert (finding.code, finding.fqns) == ("FK203", ("backbone.1",))
    net.backbone.eval()
    assert torch.equal(net.backbone(x), net.backbone(x))
    assert audit(net).findings == ()


@pytest.mark.parametrize(
    ("make", "fqns"),
    [
        pytest.param(
            lambda: nn.LSTM(4, 4, num_layers=2, dropout=0.5), ("backbone",), id="LSTM-2-layers"
        ),
        pytest.param(
            lambda: nn.MultiheadAttention(4, 2, dropout=0.5), ("backbone",), id="attention"
        ),
        pytest.param(
            lambda: nn.TransformerEncoderLayer(4, 2, 8, dropout=0.5),
            tuple(
                f"backbone{name}" for name in (".self_attn", ".dropout", ".dropout1", ".dropout2")
            ),
            id="transformer",
        ),
    ],
)
def test_audit_finds_dropout_inside_other_layers(
    make: Callable[[], nn.Module], fqns: tuple[str, ...]
) -> None:
    """Dropout that is no module of its own is found as well (B6)."""
    net = Net(make(), nn.Linear(4, 1))
    freeze(net, "backbone")
    (finding,) = audit(net).findings
    assert finding.code == "FK203"
    assert sorted(finding.fqns) == sorted(fqns)


def nested(name: str, child: nn.Module) -> nn.Module:
    """``child`` under a dotted name, beside a head that learns."""
    first, _, rest = name.partition(".")
    inner = nested(rest, child) if rest else child
    if first.isdecimal():
        return nn.Sequential(*[nn.Linear(2, 2) for _ in range(int(first))], inner, nn.Linear(2, 2))
    return nn.ModuleDict({first: inner, "head": nn.Linear(2, 2)})


@pytest.mark.parametrize("name", ["encoder", "encoder.body", "encoder.1", "0", "1.encoder", "1.0"])
def test_mend_of_active_dropout_is_code_that_works(name: str) -> None:
    """The code that audit proposes against active dropout runs, and mends it (B6)."""
    model = nested(name, nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5)))
    freeze(model, name)
    (finding,) = (finding for finding in audit(model).findings if finding.code == "FK203")
    code = finding.mend.partition("model.train(): ")[2].removesuffix(".")
    exec(code, {"model": model})  # the mend is for the user to run
    assert "FK203" not in {finding.code for finding in audit(model).findings}


# -- B9, B10: what the optimizer still does ----------------------------------------------------


def optimizers() -> Iterator[Any]:
    """Every optimizer of torch.optim over dense gradients, in each of its implementations."""
    fused = ("SGD", "Adam", "AdamW", "Adagrad")
    with_decay = ("Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "NAdam")
    options: dict[str, dict[str, Any]] = {
        name: {"weight_decay": 0.1} for name in (*with_decay, "RAdam", "Muon")
    }
    options["Rprop"] = {}
    options["SGD"] = {"weight_decay": 0.1, "momentum": 0.9}
    options["RMSprop"] = {"weight_decay": 0.1, "momentum": 0.9}
    for name, keywords in options.items():
        ways: list[dict[str, bool]] = [{"foreach": False}, {"foreach": True}]
        if name == "Muon":
            ways = [{}]
        elif name in fused:
            ways.append({"fused": True})
        for way in ways:
            marks = "-".join(key for key, on in way.items() if on) or "single"
            yield pytest.param(name, {**keywords, **way}, id=f"{name}-{marks}")


each_optimizer = pytest.mark.parametrize(("name", "options"), list(optimizers()))


def trained(name: str, options: dict[str, Any]) -> tuple[Net, Optimizer, torch.Tensor]:
    """A model after two steps, the same one at every call: momentum and gradients are there."""
    torch.manual_seed(1)
    # Without biases: Muon takes matrices only.
    net = Net(nn.Linear(3, 4, bias=False), nn.Linear(4, 2, bias=False))
    optimizer: Optimizer = getattr(torch.optim, name)(net.parameters(), lr=0.1, **options)
    x = torch.randn(5, 3)
    for _ in range(2):
        optimizer.zero_grad()
        net(x).pow(2).mean().backward()
        optimizer.step()
    return net, optimizer, x


@each_optimizer
def test_zeroed_gradient_does_not_move_what_is_frozen(name: str, options: dict[str, Any]) -> None:
    """Momentum and weight decay move a weight with a zero gradient, but not a frozen one (B9)."""
    net, optimizer, x = trained(name, options)
    optimizer.zero_grad(set_to_none=False)
    net.backbone.requires_grad_(False)
    before = values_of(net.backbone)
    optimizer.step()
    assert bool(moved(net.backbone, before)) is (name != "Rprop")  # it goes by the sign alone

    net, optimizer, x = trained(name, options)
    optimizer.zero_grad(set_to_none=False)
    assert freeze(net, "backbone").cleared == ("backbone.weight",)
    before = values_of(net.backbone)
    optimizer.step()
    train_epochs(net, optimizer, x)
    assert moved(net.backbone, before) == []
    assert net.get_parameter("backbone.weight").grad is None


@each_optimizer
def test_update_between_backward_and_step_does_not_land(name: str, options: dict[str, Any]) -> None:
    """A weight frozen between backward() and step() gets no last update (B10)."""
    net, optimizer, _ = trained(name, options)
    net.backbone.requires_grad_(False)
    before = values_of(net.backbone)
    optimizer.step()
    assert moved(net.backbone, before) == ["weight"]

    net, optimizer, _ = trained(name, options)
    freeze(net, "backbone")
    before, head = values_of(net.backbone), values_of(net.head)
    optimizer.step()
    assert moved(net.backbone, before) == []
    assert moved(net.head, head) == ["weight"]


@each_optimizer
def test_optimizer_lets_go_of_what_is_frozen(name: str, options: dict[str, Any]) -> None:
    """optimizer= takes a frozen weight and its state out; the rest trains the same (B9)."""
    kept, optimizer, x = trained(name, options)
    freeze(kept, "backbone")
    train_epochs(kept, optimizer, x)

    net, optimizer, x = trained(name, options)
    before = values_of(net.backbone)
    change = freeze(net, "backbone", optimizer=optimizer).optimizer
    assert change is not None
    assert change.removed == 1
    assert change.state_bytes > 0
    weight = net.get_parameter("backbone.weight")
    assert all(p is not weight for group in optimizer.param_groups for p in group["params"])
    assert weight not in optimizer.state
    train_epochs(net, optimizer, x)
    assert moved(net.backbone, before) == []
    assert moved(net.head, values_of(kept.head)) == []
    optimizer.load_state_dict(optimizer.state_dict())


@each_optimizer
def test_optimizer_may_be_left_without_parameters(name: str, options: dict[str, Any]) -> None:
    """Freezing everything out of an optimizer leaves a group that a step goes through (B9)."""
    net, optimizer, _ = trained(name, options)
    freeze(net, optimizer=optimizer)
    before = values_of(net)
    optimizer.step()
    assert [group["params"] for group in optimizer.param_groups] == [[]]
    assert moved(net, before) == []


def test_sparse_gradient_does_not_move_what_is_frozen() -> None:
    """A frozen embedding with a sparse gradient stays as it is (B10)."""
    results = []
    for hold in (lambda m: m.requires_grad_(False), freeze):
        embedding = nn.Embedding(4, 2, sparse=True)
        optimizer: Optimizer = torch.optim.SparseAdam(embedding.parameters(), lr=0.1)
        embedding(torch.tensor([1, 2])).sum().backward()
        before = values_of(embedding)
        hold(embedding)
        optimizer.step()
        results.append(moved(embedding, before))
    assert results == [["weight"], []]


def test_lbfgs_cannot_let_go() -> None:
    """LBFGS moves weights by its history, without a gradient: it is refused, and made anew (B9)."""

    def trained_by_lbfgs() -> tuple[Net, Optimizer, Callable[[], float]]:
        torch.manual_seed(1)
        net = Net(nn.Linear(3, 4), nn.Linear(4, 2))
        optimizer: Optimizer = torch.optim.LBFGS(net.parameters(), lr=0.1, max_iter=3)
        x = torch.randn(20, 3)

        def closure() -> float:
            net.zero_grad()
            loss: torch.Tensor = (net(x) - 1).pow(2).mean()
            torch.autograd.backward(loss)
            return loss.item()

        optimizer.step(closure)
        return net, optimizer, closure

    net, optimizer, closure = trained_by_lbfgs()
    net.backbone.requires_grad_(False)
    net.zero_grad()
    before = values_of(net.backbone)
    optimizer.step(closure)
    assert moved(net.backbone, before)

    net, optimizer, closure = trained_by_lbfgs()
    with pytest.raises(OptimizerError, match="LBFGS keeps its own flat list of parameters"):
        freeze(net, "backbone", optimizer=optimizer)
    assert all(p.requires_grad and p.grad is not None for p in net.parameters())
    freeze(net, "backbone")
    before, head = values_of(net.backbone), values_of(net.head)
    anew: Optimizer = torch.optim.LBFGS(net.head.parameters(), lr=0.1)
    anew.step(closure)
    assert moved(net.backbone, before) == []
    assert moved(net.head, head)


def test_clipping_does_not_count_what_is_frozen() -> None:
    """A leftover gradient would go into the norm that gradients are clipped by (B10)."""
    net = Net(nn.Linear(3, 4), nn.Linear(4, 2))
    (net(torch.randn(2, 3)).sum() * 100).backward()
    expected = nn.utils.get_total_norm(
        [p.grad for p in net.head.parameters() if p.grad is not None]
    )
    plain = copy.deepcopy(net)
    for one, other in zip(plain.parameters(), net.parameters(), strict=True):
        one.grad = other.grad
    plain.backbone.requires_grad_(False)
    assert nn.utils.clip_grad_norm_(plain.parameters(), 1e9) > expected

    freeze(net, "backbone")
    assert torch.equal(nn.utils.clip_grad_norm_(net.parameters(), 1e9), expected)


def test_graph_made_before_the_freeze_gives_no_gradient() -> None:
    """A backward through a graph that is older than the freeze fills no .grad (B10)."""
    net, optimizer, x = trained("SGD", {"momentum": 0.9, "weight_decay": 0.1})
    optimizer.zero_grad()
    loss = net(x).pow(2).mean()
    freeze(net, "backbone")
    before = values_of(net.backbone)
    loss.backward()
    optimizer.step()
    assert net.get_parameter("backbone.weight").grad is None
    assert moved(net.backbone, before) == []


def test_audit_finds_leftover_gradients() -> None:
    """An audit names frozen parameters that still have a gradient, and freeze mends it (B9)."""
    net, _, _ = trained("AdamW", {})
    net.backbone.requires_grad_(False)
    (finding,) = audit(net).findings
    assert (finding.code, finding.fqns) == ("FK301", ("backbone.weight",))
    freeze(net, "backbone")
    assert audit(net).findings == ()


def test_gradients_wait_outside_a_frozen_block() -> None:
    """In a frozen block no step moves the weight; accumulated gradients are back after it (B10)."""
    net, optimizer, _ = trained("AdamW", {"weight_decay": 0.1})
    weight = net.get_parameter("backbone.weight")
    grad = weight.grad
    before = values_of(net.backbone)
    with frozen(net, "backbone"):
        optimizer.step()
        assert moved(net.backbone, before) == []
    assert weight.grad is grad
    optimizer.step()
    assert moved(net.backbone, before) == ["weight"]


# -- B12, B13: copies and dry runs -------------------------------------------------------------


def test_frozen_average_of_a_model_follows_the_average_only() -> None:
    """A frozen EMA copy changes by what the user averages into it, and by nothing else (B12)."""
    net, x = flat_net(nn.BatchNorm1d(3))
    ema = copy.deepcopy(net)
    freeze(ema)
    ema.train()(x)
    with torch.no_grad():
        for mean, parameter in zip(ema.parameters(), net.parameters(), strict=True):
            mean.lerp_(parameter + 1, 0.5)
    buffers = dict(net.named_buffers())
    assert all(torch.equal(value, buffers[name]) for name, value in ema.named_buffers())
    for mean, parameter in zip(ema.parameters(), net.parameters(), strict=True):
        assert torch.equal(mean, torch.lerp(parameter, parameter + 1, 0.5))


def fail_to_freeze(model: nn.Module) -> None:
    with pytest.raises(UnmatchedPatternError, match="FAKE"):
        freeze(model, ["backbone", "FAKE"])


def fail_on_a_warning(model: nn.Module) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match="nothing in Net is trainable"):
            freeze(model, ["backbone", "head"])


@pytest.mark.parametrize(
    "look",
    [
        pytest.param(select, id="select"),
        pytest.param(audit, id="audit"),
        pytest.param(lambda model: str(audit(model)), id="audit-printed"),
        pytest.param(freeze_state, id="freeze_state"),
        pytest.param(fail_to_freeze, id="freeze-with-an-error"),
        pytest.param(fail_on_a_warning, id="freeze-with-a-warning-as-error"),
        pytest.param(lambda model: frozen(model).__enter__, id="frozen-not-entered"),
    ],
)
@pytest.mark.parametrize("grad_mode", [True, False], ids=["grad", "no_grad"])
def test_looking_changes_nothing(look: Callable[[nn.Module], object], grad_mode: bool) -> None:
    """A look, or a call that fails, leaves values, flags, modes, gradients and RNG alone (B13)."""
    net, x = flat_net(nn.BatchNorm1d(3))
    net.get_submodule("backbone.1").eval()
    net.get_parameter("backbone.0.bias").requires_grad = False
    net(x).sum().backward()
    before = values_of(net)
    modes = [module.training for module in net.modules()]
    dicts = [dict(module.__dict__) for module in net.modules()]
    flags = [p.requires_grad for p in net.parameters()]
    grads = [p.grad for p in net.parameters()]
    random = torch.random.get_rng_state()
    with torch.set_grad_enabled(grad_mode):
        look(net)
        assert torch.is_grad_enabled() is grad_mode
    assert moved(net, before) == []
    assert [module.training for module in net.modules()] == modes
    assert [dict(module.__dict__) for module in net.modules()] == dicts
    assert [p.requires_grad for p in net.parameters()] == flags
    assert all(p.grad is grad for p, grad in zip(net.parameters(), grads, strict=True))
    assert torch.equal(torch.random.get_rng_state(), random)


def test_freezing_draws_nothing_and_computes_nothing() -> None:
    """Freezing changes flags, gradients and modes, but no value and no random state (B13)."""
    net, _ = flat_net(nn.BatchNorm1d(3))
    before, random = values_of(net), torch.random.get_rng_state()
    freeze(net)
    unfreeze(net)
    train_only(net, "head")
    with frozen(net):
        pass
    assert moved(net, before) == []
    assert torch.equal(torch.random.get_rng_state(), random)
