"""DistributedDataParallel, FSDP and FSDP2 on gloo: frozen stays frozen, names stay names."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, fully_shard
from torch.multiprocessing.spawn import spawn
from torch.nn.parallel import DistributedDataParallel

import freezekit
from wrappers.ddp_workers import train_frozen
from wrappers.wrappers_support import (
    BACKBONE,
    Net,
    backward,
    below,
    bits,
    flags,
    inputs,
    make_net,
    make_optimizer,
    moved,
    train,
    whole,
    without_wrappers,
)

alone = pytest.mark.usefixtures("process_group")


# -- DistributedDataParallel --------------------------------------------------------------------


def test_two_processes(tmp_path: Path) -> None:
    """Two processes train a model that was sent to them frozen: alike, and frozen in both."""
    net = make_net()
    freezekit.freeze(net, "backbone")
    spawn(  # type: ignore[no-untyped-call]
        train_frozen, (pickle.dumps(net), str(tmp_path)), nprocs=2
    )
    ranks = [torch.load(tmp_path / f"rank{rank}.pt") for rank in (0, 1)]
    sent = bits(net)
    for rank in ranks:
        assert rank["state"] == freezekit.freeze_state(net)
        changed = {name for name, value in rank["after"].items() if not value.equal(sent[name])}
        assert changed == below(sent, "head")
    for name, _ in net.named_parameters():
        assert ranks[0]["after"][name].equal(ranks[1]["after"][name]), name


@alone
def test_ddp_holds() -> None:
    """A model that is frozen and wrapped then trains what is left, through the wrapper."""
    net = make_net()
    freezekit.freeze(net, "backbone")
    model = DistributedDataParallel(net)
    before = bits(net)
    train(model, make_optimizer(model))
    assert moved(before, net) == below(before, "head")


@alone
def test_ddp_frozen_inside_the_wrapper() -> None:
    """Freezing through the wrapper holds as well, where DDP is told to look for what is unused."""
    net = make_net()
    model = DistributedDataParallel(net, find_unused_parameters=True)
    optimizer = make_optimizer(model)
    train(model, optimizer)
    freezekit.freeze(model, "backbone", optimizer=optimizer)
    before = bits(net)
    train(model, optimizer)
    assert moved(before, net) == below(before, "head")


# -- FSDP2 --------------------------------------------------------------------------------------


def shard(net: Net) -> Net:
    """Shard a model in place, as ``fully_shard`` is used: its blocks first, then the rest."""
    mesh = init_device_mesh("cpu", (1,))
    fully_shard(net.backbone.blocks, mesh=mesh)
    fully_shard(net, mesh=mesh)
    return net


@alone
def test_fsdp2_holds() -> None:
    """A sharded model that is frozen trains what is left, and keeps its names."""
    net = shard(make_net())
    classes = [type(module) for module in net.modules()]
    report = freezekit.freeze(net, "backbone")
    before = bits(net)
    train(net, make_optimizer(net))
    assert report.changed == BACKBONE
    assert moved(before, net) == below(before, "head")
    assert [type(module) for module in net.modules()] == classes


@alone
def test_fsdp2_sharded_after_the_freeze() -> None:
    """A model that is frozen and sharded then is still held, though its tensors are new ones."""
    net = make_net()
    freezekit.freeze(net, "backbone")
    shard(net)
    before = bits(net)
    train(net, make_optimizer(net))
    assert moved(before, net) == below(before, "head")


@alone
def test_fsdp2_in_the_middle_of_training() -> None:
    """Freezing and unfreezing between steps takes effect at once, with the optimizer."""
    net = shard(make_net())
    optimizer = make_optimizer(net)
    train(net, optimizer)
    change = freezekit.freeze(net, "backbone", optimizer=optimizer).optimizer
    assert change is not None
    assert (change.removed, change.state_bytes > 0) == (len(BACKBONE), True)
    before = bits(net)
    train(net, optimizer)
    assert moved(before, net) == below(before, "head")
    freezekit.unfreeze(net, "backbone", optimizer=optimizer)
    train(net, optimizer)
    assert moved(before, net) == before.keys()


@alone
def test_fsdp2_after_a_validation_step() -> None:
    """A freeze right after a forward without gradients is kept, although tensors are whole then."""
    net = shard(make_net())
    optimizer = make_optimizer(net)
    train(net, optimizer)
    net.eval()
    with torch.no_grad():
        net(inputs())
    assert not all(hasattr(p, "device_mesh") for p in net.parameters()), "some are whole now"
    freezekit.freeze(net, "backbone", optimizer=optimizer)
    for module in net.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    assert [name for name, flag in flags(net).items() if not flag] == list(BACKBONE)
    before = bits(net)
    train(net, optimizer)
    assert moved(before, net) == below(before, "head")


@alone
def test_fsdp2_state_loaded_after_a_validation_step() -> None:
    """A freeze that is loaded right after a forward without gradients is kept as well."""
    frozen = make_net()
    freezekit.freeze(frozen, "backbone")
    net = shard(make_net())
    optimizer = make_optimizer(net)
    with torch.no_grad():
        net(inputs())
    freezekit.load_freeze_state(net, freezekit.freeze_state(frozen))
    before = bits(net)
    train(net, optimizer)
    assert moved(before, net) == below(before, "head")


@alone
def test_fsdp2_frozen_for_a_validation_step() -> None:
    """A block that is frozen around a forward without gradients leaves all to learn after it."""
    net = shard(make_net())
    optimizer = make_optimizer(net)
    train(net, optimizer)
    with freezekit.frozen(net), torch.no_grad():
        net(inputs())
    before = bits(net)
    train(net, optimizer, steps=1)
    assert moved(before, net) == before.keys()


@alone
@pytest.mark.parametrize("look", [freezekit.select, freezekit.audit, freezekit.freeze_state])
def test_fsdp2_between_forward_and_backward(look: Callable[[nn.Module], object]) -> None:
    """Looking at a sharded model, or freezing a part of it, leaves a pending backward right."""
    net, twin = shard(make_net()), shard(make_net())
    batch = inputs()
    output, expected = net(batch), twin(batch)
    look(net)
    freezekit.freeze(net, "backbone.blocks")
    backward(output)
    backward(expected)
    for (name, parameter), (_, other) in zip(
        net.named_parameters(), twin.named_parameters(), strict=True
    ):
        if name.startswith("backbone.blocks"):
            assert parameter.grad is None, name
        else:
            assert parameter.grad is not None, name
            assert other.grad is not None, name
            assert torch.equal(whole(parameter.grad), whole(other.grad)), name


@alone
def test_fsdp2_counts_the_whole() -> None:
    """Sizes in reports and audits of a sharded model are those of the whole tensors."""
    bare = make_net()
    freezekit.freeze(bare, "backbone")
    net = shard(make_net())
    report = freezekit.freeze(net, "backbone")
    expected = freezekit.audit(bare)
    found = freezekit.audit(net)
    assert (report.frozen, report.trainable) == (expected.frozen, expected.trainable)
    assert (found.frozen, found.trainable, found.parameter_bytes, found.buffer_bytes) == (
        expected.frozen,
        expected.trainable,
        expected.parameter_bytes,
        expected.buffer_bytes,
    )
    assert found.sharded == len(list(net.parameters()))


# -- FSDP1 --------------------------------------------------------------------------------------


def wrap_fsdp1(net: Net, *, use_orig_params: bool) -> FullyShardedDataParallel:
    """Wrap a model with the older FSDP; norms are left whole, since their statistics are."""
    cpu = torch.device("cpu")
    net.backbone.linear = FullyShardedDataParallel(  # type: ignore[assignment]
        net.backbone.linear, use_orig_params=use_orig_params, device_id=cpu
    )
    return FullyShardedDataParallel(net, use_orig_params=use_orig_params, device_id=cpu)


fsdp1_warns = pytest.mark.filterwarnings("ignore:.*:FutureWarning", "ignore:.*:UserWarning")


@alone
@fsdp1_warns
def test_fsdp1_holds() -> None:
    """With original parameters, names are those of the bare model, and frozen stays frozen."""
    net = make_net()
    names = [name for name, _ in net.named_parameters()]
    model = wrap_fsdp1(net, use_orig_params=True)
    assert freezekit.select(model).parameters == tuple(names)
    assert freezekit.freeze(model, "backbone").changed == BACKBONE
    before = bits(model)
    train(model, make_optimizer(model))
    changed = {without_wrappers(name, "_fsdp_wrapped_module") for name in moved(before, model)}
    assert changed == below(bits(make_net()), "head")


@alone
@fsdp1_warns
def test_fsdp1_flat() -> None:
    """With flat parameters only, what is one tensor is frozen as one, and statistics are held."""
    model = wrap_fsdp1(make_net(), use_orig_params=False)
    assert freezekit.select(model).parameters == ("_flat_param", "backbone.linear._flat_param")
    freezekit.freeze(model, "backbone.linear")
    before = bits(model)
    train(model, make_optimizer(model))
    unmoved = {name for name in before.keys() - moved(before, model) if "_flat_param" in name}
    assert {without_wrappers(name, "_fsdp_wrapped_module") for name in unmoved} == {
        "backbone.linear._flat_param"
    }


# -- between them -------------------------------------------------------------------------------


@alone
@fsdp1_warns
@pytest.mark.parametrize("kind", ["FSDP2", "FSDP1", "DDP"])
def test_freeze_moves_between_shardings(kind: str) -> None:
    """The freeze of a distributed model loads into a bare one, and the other way round."""

    def make() -> nn.Module:
        if kind == "FSDP2":
            return shard(make_net())
        if kind == "FSDP1":
            return wrap_fsdp1(make_net(), use_orig_params=True)
        return DistributedDataParallel(make_net())

    model = make()
    freezekit.freeze(model, "backbone")
    state = json.loads(json.dumps(freezekit.freeze_state(model)))
    bare = make_net()
    freezekit.load_freeze_state(bare, state)
    assert freezekit.freeze_state(bare) == state
    back = make()
    freezekit.load_freeze_state(back, state)
    assert freezekit.freeze_state(back) == state
    assert [name for name, flag in flags(bare).items() if not flag] == list(BACKBONE)
