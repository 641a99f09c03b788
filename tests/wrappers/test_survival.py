"""What is frozen holds still, to the bit, wherever the model goes after the freeze."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import nn
from torch.nn.utils import parametrizations, parametrize
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import freezekit
from wrappers.wrappers_support import (
    Backbone,
    Net,
    below,
    bits,
    inputs,
    make_net,
    make_optimizer,
    moved,
    numbers,
    train,
)

STATISTICS = ("backbone.norm", "backbone.blocks.1")


def by_pickle(protocol: int) -> Callable[[nn.Module], nn.Module]:
    def make(model: nn.Module) -> nn.Module:
        loaded: nn.Module = pickle.loads(pickle.dumps(model, protocol))
        return loaded

    return make


def by_torch_save(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded: nn.Module = torch.load(file, weights_only=False)
    return loaded


def by_fx(model: nn.Module) -> nn.Module:
    return torch.fx.symbolic_trace(model)


def by_module_dict(model: nn.Module) -> nn.Module:
    """The model's children, moved into another module."""
    other = Net()
    for name, child in model.named_children():
        other.add_module(name, child)
    return other


def train_each(model: nn.Module) -> nn.Module:
    """Every module put into train mode by itself, children before their parents."""
    for module in reversed(list(model.modules())):
        module.train()
    return model


def set_attribute(module: nn.Module) -> None:
    """What ``Module.apply`` calls on each module."""
    module.__dict__["extra"] = 1


ROUTES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "as it is": lambda model: model,
    "deepcopy": copy.deepcopy,
    "deepcopy twice": lambda model: copy.deepcopy(copy.deepcopy(model)),
    "pickle 0": by_pickle(0),
    "pickle 2": by_pickle(2),
    "pickle 5": by_pickle(5),
    "torch.save": by_torch_save,
    "to(float64)": lambda model: model.to(torch.float64),
    "half and back": lambda model: model.half().float(),
    "apply": lambda model: model.apply(set_attribute),
    "eval and train": lambda model: model.eval().train().eval(),
    "train each": train_each,
    "load_state_dict": lambda model: (model.load_state_dict(make_net().state_dict()), model)[1],
    "share_memory": lambda model: model.share_memory(),
    "symbolic_trace": by_fx,
    "deepcopy of symbolic_trace": lambda model: copy.deepcopy(by_fx(model)),
    "children moved": by_module_dict,
    "requires_grad_ and freeze again": lambda model: (
        model.requires_grad_(True),
        freezekit.freeze(model, "backbone"),
        model,
    )[2],
}


# -- holding still ------------------------------------------------------------------------------


@pytest.mark.parametrize("route", ROUTES.values(), ids=ROUTES)
def test_trained_after(route: Callable[[nn.Module], nn.Module]) -> None:
    """Real steps move all of the head, and not a bit of the frozen backbone."""
    net = make_net()
    freezekit.freeze(net, "backbone")
    model = route(net)
    before = bits(model)
    train(model, make_optimizer(model), like=next(model.parameters()))
    assert moved(before, model) == below(before, "head")


# symbolic_trace leaves no backbone that could be called alone.
CALLABLE_ROUTES = {name: route for name, route in ROUTES.items() if "symbolic_trace" not in name}


@pytest.mark.parametrize("route", CALLABLE_ROUTES.values(), ids=CALLABLE_ROUTES)
def test_outputs_of_the_checkpoint(route: Callable[[nn.Module], nn.Module]) -> None:
    """After training, the frozen backbone answers as it did in eval mode before the freeze."""
    net = make_net()
    freezekit.freeze(net, "backbone")
    model = route(net)
    like = next(model.parameters())
    checkpoint = copy.deepcopy(model.get_submodule("backbone"))
    freezekit.unfreeze(checkpoint)
    train(model, make_optimizer(model), like=like)
    batch = inputs(like)
    answers = model.train().get_submodule("backbone")(batch)
    assert torch.equal(answers, checkpoint.eval()(batch))
    assert not torch.equal(answers, checkpoint.train()(batch))


def test_flags_alone_do_not_hold() -> None:
    """The same steps do move the statistics of a backbone that is frozen by its flags alone."""
    net = make_net()
    net.backbone.requires_grad_(requires_grad=False)
    before = bits(net)
    train(net, make_optimizer(net))
    assert {name.rpartition(".")[0] for name in below(moved(before, net), "backbone")} == set(
        STATISTICS
    )


def test_keep_does_not_hold() -> None:
    """With ``norm_stats="keep"`` the statistics move, and the parameters do not."""
    net = make_net()
    report = freezekit.freeze(net, "backbone", norm_stats="keep")
    before = bits(net)
    train(net, make_optimizer(net))
    assert report.held == ()
    assert {name.rpartition(".")[0] for name in below(moved(before, net), "backbone")} == set(
        STATISTICS
    )


def test_names_and_classes_stay() -> None:
    """A hold changes no class, no key of the state dict, no name of a module."""
    net = make_net()
    before = (
        [(name, type(module)) for name, module in net.named_modules()],
        list(net.state_dict()),
        numbers(net.modules()),
        numbers(net.parameters()),
    )
    freezekit.freeze(net, "backbone")
    net.train()
    assert before == (
        [(name, type(module)) for name, module in net.named_modules()],
        list(net.state_dict()),
        numbers(net.modules()),
        numbers(net.parameters()),
    )
    make_net().load_state_dict(net.state_dict())


@pytest.mark.parametrize(
    "asked",
    [(), (True,), (False,), (True, False), (False, True), (False, True, False)],
    ids=lambda asked: "-".join("train" if mode else "eval" for mode in asked) or "nothing",
)
@pytest.mark.parametrize("route", ["as it is", "deepcopy", "pickle 5", "torch.save"])
def test_mode_comes_back(route: str, asked: tuple[bool, ...]) -> None:
    """On unfreeze, each module has the mode that it would have had without the freeze."""
    model: nn.Module = make_net()
    twin = make_net()
    freezekit.freeze(model, "backbone")
    for mode in asked:
        model.train(mode)
        twin.train(mode)
    model = ROUTES[route](model)
    assert not any(model.get_submodule(name).training for name in STATISTICS)
    freezekit.unfreeze(model)
    assert [m.training for m in model.modules()] == [m.training for m in twin.modules()]
    assert [m.training for m in model.train().modules()] == [True] * len(list(twin.modules()))


@pytest.mark.parametrize("route", ["deepcopy", "pickle 5", "torch.save"])
def test_copies_are_apart(route: str) -> None:
    """Unfreezing a copy leaves the original held, and the other way round."""
    net = make_net()
    freezekit.freeze(net, "backbone")
    made = ROUTES[route](net)
    freezekit.unfreeze(made)
    assert net.train().backbone.norm.training is False
    assert made.train().get_submodule("backbone.norm").training is True
    again = ROUTES[route](net)
    freezekit.unfreeze(net)
    assert again.train().get_submodule("backbone.norm").training is False
    assert net.train().backbone.norm.training is True


def test_shallow_copy() -> None:
    """A shallow copy shares the hold; once the original has gone, its train() says so."""
    norm = nn.BatchNorm1d(3)
    freezekit.freeze(norm)
    shallow = copy.copy(norm)
    assert shallow.training is False
    del norm
    gc.collect()
    with pytest.raises(RuntimeError, match=r"shallow copy \(copy\.copy\) of one that"):
        shallow.train()
    freezekit.unfreeze(shallow)
    assert shallow.train().training is True


def test_held_model_is_freed() -> None:
    """A held model goes with its last reference: the hold makes no cycle."""
    net = make_net()
    freezekit.freeze(net, "backbone")
    gone = weakref.ref(net.backbone.norm)
    gc.disable()
    try:
        del net
        assert gone() is None
    finally:
        gc.enable()


# -- what torch makes of a held model -----------------------------------------------------------


def test_functional_call() -> None:
    """A functional call of a frozen model moves no statistics of its backbone."""
    net = make_net()
    freezekit.freeze(net, "backbone")
    before = bits(net.train())
    torch.func.functional_call(net, dict(net.named_parameters()), (inputs(),))
    assert moved(before, net) == {
        "head.0.running_mean",
        "head.0.running_var",
        "head.0.num_batches_tracked",
    }


def test_export() -> None:
    """An exported program of a frozen model has its names and answers as it does."""
    net = make_net()
    freezekit.freeze(net)
    net.train()
    batch = inputs()
    program = torch.export.export(net, (batch,))
    before = bits(net)
    assert torch.equal(program.module()(batch), net(batch))
    assert set(program.state_dict) == set(net.state_dict())
    assert moved(before, net) == set()


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_jit_script() -> None:
    """A scripted copy of a frozen model has the modes that the model has, held ones too."""
    net = make_net()
    freezekit.freeze(net, "backbone")
    net.train()
    scripted = torch.jit.script(net)
    before = bits(scripted)
    scripted(inputs())
    assert below(moved(before, scripted), "backbone") == set()


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_jit_trace() -> None:
    """A traced copy of a frozen model moves no statistics of its backbone."""
    net = make_net()
    freezekit.freeze(net)
    net.train()
    traced = torch.jit.trace(net, inputs())  # type: ignore[no-untyped-call]
    before = bits(traced)
    traced(inputs())
    assert moved(before, traced) == set()


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_scripted_child() -> None:
    """A scripted module inside an eager model can be frozen, held and unfrozen."""
    model = nn.Sequential(torch.jit.script(Backbone()), nn.Linear(6, 2))
    report = freezekit.freeze(model, "0")
    before = bits(model)
    train(model, make_optimizer(model))
    assert report.held == ("0.norm", "0.blocks.1")
    assert moved(before, model) == {"1.weight", "1.bias"}
    freezekit.unfreeze(model)
    train(model, make_optimizer(model))
    assert moved(before, model) == before.keys()


def test_replicas() -> None:
    """The replicas that DataParallel makes of a held module are in eval mode."""
    net = make_net()
    freezekit.freeze(net, "backbone")
    net.train()
    replica = net.backbone.norm._replicate_for_data_parallel()  # type: ignore[no-untyped-call]
    assert replica.training is False
    assert net.backbone.norm.training is False


@pytest.mark.parametrize("reentrant", [False, True], ids=["non-reentrant", "reentrant"])
def test_activation_checkpoints(reentrant: bool) -> None:
    """Recomputing a frozen part in backward moves no statistics of it."""
    net = make_net()
    freezekit.freeze(net, "backbone")
    before = bits(net.train())
    batch = inputs().requires_grad_()
    output = torch.utils.checkpoint.checkpoint(net, batch, use_reentrant=reentrant)
    output.sum().backward()
    assert below(moved(before, net), "backbone") == set()
    assert net.head[1].weight.grad is not None


@pytest.mark.parametrize("use_buffers", [False, True], ids=["parameters", "and buffers"])
def test_averaged_model(use_buffers: bool) -> None:
    """An average of a frozen model is held as it is, and equals it where it is frozen."""
    net = make_net()
    freezekit.freeze(net, "backbone")
    ema = get_ema_multi_avg_fn(0.9)  # type: ignore[no-untyped-call]
    average = AveragedModel(net, multi_avg_fn=ema, use_buffers=use_buffers)
    before = bits(net)
    optimizer = make_optimizer(net)
    for _ in range(3):
        train(net, optimizer, steps=1)
        average.update_parameters(net)
        average.train()
        average(inputs())
    assert below(moved(before, average.module), "backbone") == set()
    assert below(moved(before, net), "backbone") == set()
    assert freezekit.freeze_state(average)["held"].keys() == set(STATISTICS)


def test_accelerate() -> None:
    """What accelerate prepares of a frozen model holds still, under its own optimizer too."""
    from accelerate import Accelerator  # type: ignore[import-untyped]

    net = make_net()
    freezekit.freeze(net, "backbone")
    accelerator = Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(net, make_optimizer(net))
    before = bits(net)
    for _ in range(3):
        model.train()
        optimizer.zero_grad()
        accelerator.backward(model(inputs()).pow(2).mean())
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    assert moved(before, net) == below(before, "head")
    change = freezekit.freeze(model, "head.1", optimizer=optimizer).optimizer
    assert change is not None
    assert (change.optimizer, change.removed) == ("AcceleratedOptimizer", 2)
    before = bits(net)
    train(net, optimizer)
    assert moved(before, net) == below(before, "head.0")


# -- training loops of other kinds --------------------------------------------------------------


def test_modes_set_by_hand() -> None:
    """Code that sets ``training`` by hand goes past a hold; audit says so, train() mends it."""
    net = make_net()
    freezekit.freeze(net, "backbone")
    assert "FK201" not in {finding.code for finding in freezekit.audit(net.train()).findings}
    for module in net.modules():
        module.training = True
    (finding,) = (f for f in freezekit.audit(net).findings if f.code == "FK201")
    assert finding.fqns == STATISTICS
    before = bits(net)
    train(net, make_optimizer(net))
    assert moved(before, net) == below(before, "head")


class KeepsNormsInEval(Net):
    """As detection libraries write it: ``train`` that puts norms into eval and returns nothing."""

    def train(self, mode: bool = True) -> Any:
        super().train(mode)
        for module in self.modules():
            if isinstance(module, nn.BatchNorm1d):
                module.eval()


def test_train_that_returns_nothing() -> None:
    """A model whose own train() puts norms into eval has its way before and after the hold."""
    model = KeepsNormsInEval()
    freezekit.freeze(model, "backbone")
    model.train()
    assert [m.training for m in model.modules() if isinstance(m, nn.BatchNorm1d)] == [False] * 3
    freezekit.unfreeze(model)
    model.train()
    assert [m.training for m in model.modules() if isinstance(m, nn.BatchNorm1d)] == [False] * 3
    nn.Module.train(model)
    assert all(module.training for module in model.modules())


class NormWithOptions(nn.BatchNorm1d):
    """Its train() takes more than a mode."""

    momentum_scale = 1.0

    def train(self, mode: bool = True, *, momentum_scale: float = 1.0) -> NormWithOptions:
        self.momentum_scale = momentum_scale
        return super().train(mode)


def test_train_with_options() -> None:
    """A held module's train() still takes what its class's train() takes."""
    norm = NormWithOptions(3)
    freezekit.freeze(norm)
    assert norm.train(True, momentum_scale=0.5) is norm
    assert norm.momentum_scale == 0.5
    assert norm.training is False


class RaisesInTrain(nn.BatchNorm1d):
    """Its train() sets the mode and then raises."""

    def train(self, mode: bool = True) -> RaisesInTrain:
        super().train(mode)
        if mode:
            raise RuntimeError("no training today")
        return self


def test_exception_in_train() -> None:
    """A held module whose train() raises is in eval mode after it."""
    norm = RaisesInTrain(3)
    freezekit.freeze(norm)
    with pytest.raises(RuntimeError, match="no training today"):
        norm.train()
    assert norm.training is False


class RecordsModes(nn.BatchNorm1d):
    """It takes note of every mode that it is given."""

    def __init__(self, features: int) -> None:
        self.__dict__["modes"] = []
        super().__init__(features)

    @property
    def recorded(self) -> list[bool]:
        modes: list[bool] = self.__dict__["modes"]
        return modes

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "training":
            self.recorded.append(value)
        super().__setattr__(name, value)


def test_no_moment_in_train_mode() -> None:
    """A held module is at no moment in train mode: another thread may be running it."""
    norm = RecordsModes(3)
    freezekit.freeze(norm)
    norm.recorded.clear()
    norm.train()
    assert True not in norm.recorded


class CannotBeHeld(nn.BatchNorm1d):
    """Its mode is read-only."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "training" and self.__dict__.get("is_made"):
            raise AttributeError("the mode is fixed")
        super().__setattr__(name, value)

    def __init__(self, features: int) -> None:
        super().__init__(features)
        self.is_made = True


def test_error_while_holding() -> None:
    """A module that cannot be put into eval leaves the model as it was, all of it."""
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), CannotBeHeld(3), nn.Linear(3, 1))
    with pytest.raises(AttributeError, match="the mode is fixed"):
        freezekit.freeze(model, "[:3]")
    assert all(p.requires_grad for p in model.parameters())
    assert freezekit.freeze_state(model)["held"] == {}
    assert all(module.training for module in model.modules())


# -- modules of other kinds ---------------------------------------------------------------------


class UsedTwice(nn.Module):
    """One norm without parameters, in two places."""

    def __init__(self) -> None:
        super().__init__()
        norm = nn.BatchNorm1d(4, affine=False)
        self.first = nn.Sequential(nn.Linear(4, 4), norm)
        self.second = nn.Sequential(nn.Linear(4, 4), norm)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.second(self.first(x))
        return result


@pytest.mark.parametrize("name", ["first.1", "second.1"])
def test_shared_module_by_either_name(name: str) -> None:
    """A module with statistics that stands in two places is held by either of its names."""
    model = UsedTwice()
    freezekit.freeze(model, name)
    before = bits(model)
    train(model, make_optimizer(model))
    assert {key for key in moved(before, model) if ".1." in key} == set()
    freezekit.unfreeze(model, name)
    assert model.train().first[1].training is True


def test_spectral_norm() -> None:
    """The power iteration of a frozen spectral norm stops, and goes on after unfreeze."""
    layer = parametrizations.spectral_norm(nn.Linear(4, 4))
    model = nn.Sequential(layer, nn.Linear(4, 2))
    freezekit.freeze(model, "0")
    before = bits(model)
    train(model, make_optimizer(model))
    assert moved(before, model) == {"1.weight", "1.bias"}
    freezekit.unfreeze(model, "0.weight")
    train(model, make_optimizer(model))
    assert "0.parametrizations.weight.0._u" in moved(before, model)


def test_parametrized_module_is_copied() -> None:
    """A copy of a model with a held parametrisation holds it too, in its own class."""
    layer = parametrizations.spectral_norm(nn.Linear(4, 4))
    model = nn.Sequential(layer, nn.Linear(4, 2))
    freezekit.freeze(model, "0")
    made = copy.deepcopy(model)
    before = bits(made)
    train(made, make_optimizer(made))
    assert moved(before, made) == {"1.weight", "1.bias"}
    assert parametrize.is_parametrized(made[0], "weight")


def test_meta_device() -> None:
    """A model that is frozen on the meta device is held once it has memory."""
    with torch.device("meta"):
        net = Net()
    freezekit.freeze(net, "backbone")
    net.to_empty(device="cpu")
    net.load_state_dict(make_net().state_dict())
    before = bits(net)
    train(net, make_optimizer(net))
    assert moved(before, net) == below(before, "head")


def test_swapped_parameters() -> None:
    """Loading by assignment puts new tensors in, which are as frozen as the old ones."""
    net = make_net()
    freezekit.freeze(net, "backbone")
    net.load_state_dict(make_net().state_dict(), assign=True)
    before = bits(net)
    train(net, make_optimizer(net))
    assert moved(before, net) == below(before, "head")


class CheckpointedBlock(nn.Module):
    """Recomputes its activations while it trains, and has a constant among its buffers.

    As the decoder layers of recent language models have: a saved scale, which nothing moves.
    """

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 64), nn.Linear(64, 4)
        self.register_buffer("scale", torch.ones(1))
        self.recomputed = 0

    def run(self, x: torch.Tensor) -> torch.Tensor:
        self.recomputed += 1
        result: torch.Tensor = self.down(self.up(x).relu()) * self.scale
        return result

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            result = torch.utils.checkpoint.checkpoint(self.run, x, use_reentrant=False)
            assert isinstance(result, torch.Tensor)
            return result
        return self.run(x)


def test_a_constant_is_no_statistic() -> None:
    """A frozen block with a constant among its buffers goes on recomputing its activations."""
    model = nn.Sequential(nn.Linear(4, 4), CheckpointedBlock(), nn.Linear(4, 2))
    freezekit.freeze(model, "1")
    model.train()
    model(torch.randn(2, 4)).sum().backward()
    assert model[1].recomputed == 2, "once forward, and once more in backward"
