"""The names of the model that was wrapped are the names to write, through every wrapper."""

from __future__ import annotations

import json
import re
from collections import OrderedDict
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

import freezekit
from freezekit.errors import UnmatchedPatternError
from wrappers.wrappers_support import BACKBONE, Net, below, bits, flags, make_net, moved, train


def compile_in_place(net: nn.Module) -> nn.Module:
    net.compile(backend="eager")
    return net


def compile_blocks(net: nn.Module) -> nn.Module:
    """Each block compiled for itself, as large models do it."""
    assert isinstance(net, Net)
    for index, block in enumerate(net.backbone.blocks):
        net.backbone.blocks[index] = compiled(block)
    return net


def compiled(module: nn.Module) -> nn.Module:
    wrapper: nn.Module = torch.compile(module, backend="eager")  # type: ignore[assignment]
    return wrapper


def checkpoint_linears(net: nn.Module) -> nn.Module:
    apply_activation_checkpointing(net, check_fn=lambda module: isinstance(module, nn.Linear))
    return net


WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "DataParallel": nn.DataParallel,
    "DistributedDataParallel": DistributedDataParallel,
    "torch.compile": compiled,
    "Module.compile": compile_in_place,
    "compiled blocks": compile_blocks,
    "AveragedModel": AveragedModel,
    "checkpoint_wrapper": checkpoint_wrapper,
    "checkpointed linears": checkpoint_linears,
    "compiled DDP": lambda net: compiled(DistributedDataParallel(net)),
    "DDP of compiled": lambda net: DistributedDataParallel(compiled(net)),
    "compiled DDP of checkpointed and compiled blocks": lambda net: compiled(
        DistributedDataParallel(checkpoint_linears(compile_blocks(net)))
    ),
}

wrapped = pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)

NAMES = [name for name, _ in make_net().named_parameters()]


# -- names --------------------------------------------------------------------------------------


@pytest.mark.usefixtures("process_group")
@wrapped
def test_names_of_the_unwrapped(wrap: Callable[[nn.Module], nn.Module]) -> None:
    """Every parameter of a wrapped model goes by its name in the model that was wrapped."""
    model = wrap(make_net())
    assert freezekit.select(model).parameters == tuple(NAMES)
    for name in NAMES:
        assert freezekit.select(model, name).parameters == (name,)


@pytest.mark.usefixtures("process_group")
@wrapped
def test_names_as_torch_prints_them(wrap: Callable[[nn.Module], nn.Module]) -> None:
    """What ``named_parameters`` prints for a wrapped model can be written in full as well."""
    model = wrap(make_net())
    for (raw, _), name in zip(model.named_parameters(), NAMES, strict=True):
        assert freezekit.select(model, raw).parameters == (name,)


PATTERNS = {
    "subtree": "backbone",
    "module": "backbone.linear",
    "index": "backbone.blocks[0]",
    "slice": "backbone.blocks[:2]",
    "index and name": "backbone.blocks[0].weight",
    "container of the root": "head[-1]",
    "glob": "*.bias",
    "regular expression": r"re:backbone\..*weight",
    "type": "type:BatchNorm1d",
    "class": nn.Linear,
    "predicate": lambda name, parameter: name.startswith("head") and parameter.dim() == 2,
    "list": ["head", "backbone.blocks[0]"],
}


SOME = ["DataParallel", "compiled blocks", "compiled DDP of checkpointed and compiled blocks"]


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("pattern", PATTERNS.values(), ids=PATTERNS)
@pytest.mark.parametrize("wrap", [WRAPPERS[name] for name in SOME], ids=SOME)
def test_every_kind_of_pattern(
    wrap: Callable[[nn.Module], nn.Module], pattern: freezekit._patterns.Patterns
) -> None:
    """Each kind of pattern selects in a wrapped model what it selects in the bare one."""
    net = make_net()
    expected = freezekit.select(net, pattern).parameters
    assert freezekit.select(wrap(net), pattern).parameters == expected


@pytest.mark.parametrize(
    "pattern", ["[0]", "[-1]", "[:2]", "[0].weight"], ids=["first", "last", "slice", "name"]
)
@pytest.mark.parametrize(
    "wrap", [nn.DataParallel, compiled, checkpoint_wrapper, AveragedModel], ids=lambda w: w.__name__
)
def test_index_of_a_wrapped_container(wrap: Callable[[nn.Module], nn.Module], pattern: str) -> None:
    """The children of a wrapped Sequential are indexed as those of the bare one are."""
    container = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))
    expected = freezekit.select(container, pattern).parameters
    assert freezekit.select(wrap(container), pattern).parameters == expected


def test_index_among_names_as_torch_prints_them() -> None:
    """A wrapper's component may stand behind an index too, as in the printed name."""
    net = checkpoint_linears(make_net())
    raw = "backbone.blocks[0]._checkpoint_wrapped_module.weight"
    assert freezekit.select(net, raw).parameters == ("backbone.blocks.0.weight",)


# -- names that only look like a wrapper's ------------------------------------------------------


@pytest.mark.parametrize("name", ["module", "model", "base_model", "base_layer"])
def test_a_child_of_that_name(name: str) -> None:
    """A user's own child that is called like a wrapper's is a name like any other."""
    model = nn.Sequential(OrderedDict([(name, nn.Linear(2, 2)), ("head", nn.Linear(2, 1))]))
    assert freezekit.freeze(model, name).changed == (f"{name}.weight", f"{name}.bias")
    with pytest.raises(UnmatchedPatternError, match=re.escape(f"'{name}.weight'")):
        freezekit.select(model, "weight")


@pytest.mark.parametrize("name", ["module", "model", "base_model", "base_layer"])
def test_a_child_of_that_name_inside_a_wrapper(name: str) -> None:
    """Only the wrapper's own component is looked through, not a child of the same name in it."""
    model = nn.DataParallel(
        nn.Sequential(OrderedDict([(name, nn.Linear(2, 2)), ("head", nn.Linear(2, 1))]))
    )
    assert freezekit.select(model, name).parameters == (f"{name}.weight", f"{name}.bias")


@pytest.mark.parametrize("pattern", ["*mod*", "mod*", r"re:.*mod.*"])
def test_a_glob_that_reads_like_a_wrapper(pattern: str) -> None:
    """A glob or expression means the model's own names, where it matches any of them."""
    model = nn.Sequential(OrderedDict([("modes", nn.Linear(2, 2)), ("head", nn.Linear(2, 1))]))
    expected = freezekit.select(model, pattern).parameters
    assert expected == ("modes.weight", "modes.bias")
    assert freezekit.select(nn.DataParallel(model), pattern).parameters == expected


def test_unknown_name_in_a_wrapped_model() -> None:
    """The names that an error suggests are those of the model that was wrapped."""
    model = nn.DataParallel(make_net())
    with pytest.raises(UnmatchedPatternError, match=re.escape("'backbone.linear'")) as caught:
        freezekit.freeze(model, "backbone.linaer")
    assert "module." not in str(caught.value)


# -- the freeze moves between wrappings ---------------------------------------------------------


@pytest.mark.usefixtures("process_group")
@wrapped
def test_state_of_a_wrapped_model(wrap: Callable[[nn.Module], nn.Module]) -> None:
    """The freeze of a wrapped model loads into a bare one, and the other way round."""
    model = wrap(make_net())
    freezekit.freeze(model, "backbone")
    state = json.loads(json.dumps(freezekit.freeze_state(model)))
    bare = make_net()
    freezekit.load_freeze_state(bare, state)
    assert [name for name, flag in flags(bare).items() if not flag] == list(BACKBONE)
    assert freezekit.freeze_state(bare) == state
    back = wrap(make_net())
    freezekit.load_freeze_state(back, freezekit.freeze_state(bare))
    assert freezekit.freeze_state(back) == state
    before = bits(bare)
    train(bare, torch.optim.SGD(bare.parameters(), lr=0.1))
    assert moved(before, bare) == below(before, "head")


@pytest.mark.usefixtures("process_group")
@wrapped
def test_freeze_before_wrapping(wrap: Callable[[nn.Module], nn.Module]) -> None:
    """A model that is frozen before it is wrapped can be unfrozen through the wrapper."""
    net = make_net()
    freezekit.freeze(net, "backbone")
    model = wrap(net)
    report = freezekit.unfreeze(model, "backbone")
    assert report.changed == BACKBONE
    assert report.released == ("backbone.norm", "backbone.blocks.1")
    assert all(flags(model).values())


@pytest.mark.usefixtures("process_group")
@wrapped
def test_audit_of_a_wrapped_model(wrap: Callable[[nn.Module], nn.Module]) -> None:
    """An audit counts a wrapped model as it counts the bare one, by the same names."""
    net = make_net()
    net.backbone.requires_grad_(requires_grad=False)
    bare = freezekit.audit(net)
    report = freezekit.audit(wrap(net))
    assert (report.trainable, report.frozen, report.tensors, report.parameter_bytes) == (
        bare.trainable,
        bare.frozen,
        bare.tensors,
        bare.parameter_bytes,
    )
    assert [finding.fqns for finding in report.findings] == [f.fqns for f in bare.findings]
    assert bare.findings
