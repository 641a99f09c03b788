"""Autocast, torch.compile and DDP around, inside and beneath an extractor."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import freezekit as fk
from features.features_support import (
    bare,
    make_bert,
    make_convnet,
    state,
    token_batch,
    unchanged,
)
from freezekit import FrozenFeatureExtractor
from freezekit.errors import TrainableBackboneError

IMAGES = torch.randn(4, 3, 8, 8)


# -- autocast ----------------------------------------------------------------------------------


def test_autocast_around_a_step() -> None:
    """Casts made without gradients are not found again by what trains: the head learns."""
    net = nn.Linear(4, 4)
    shared = nn.Linear(4, 4)
    extractor = FrozenFeatureExtractor(net)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        features = extractor(torch.randn(2, 4))
        out = shared(features)
    assert features.dtype == torch.bfloat16
    torch.autograd.backward(out.float().sum())
    assert shared.weight.grad is not None
    assert net.weight.grad is None


def test_weights_frozen_under_autocast_can_be_trained_again() -> None:
    """No cast of a frozen weight stays in the cache to cut off the gradient of a thawed one."""
    net = nn.Linear(4, 4)
    extractor = FrozenFeatureExtractor(net)
    batch = torch.randn(2, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        extractor(batch)
        fk.unfreeze(net)
        torch.autograd.backward(net(batch).float().sum())
    assert net.weight.grad is not None


# -- torch.compile -----------------------------------------------------------------------------


@pytest.fixture
def compiler() -> None:
    """A compiler without compiled code."""
    torch._dynamo.reset()


pytestmark = pytest.mark.filterwarnings("ignore:.*:DeprecationWarning")


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("pool", [None, "mean"])
def test_compiled_as_a_whole(pool: str | None) -> None:
    """One graph, no break; the features are those of the eager extractor, without a graph."""
    net = nn.Sequential(nn.Linear(4, 4), nn.Dropout(), nn.Linear(4, 4))
    extractor = FrozenFeatureExtractor(net, pool=pool)  # type: ignore[arg-type]
    batch = torch.randn(2, 3, 4)
    compiled = torch.compile(extractor, backend="aot_eager", fullgraph=True)
    extractor.train()
    for _ in range(2):
        got = compiled(batch)
        assert not got.requires_grad
        torch.testing.assert_close(got, extractor(batch))


@pytest.mark.usefixtures("compiler")
def test_compiled_with_its_head() -> None:
    """A compiled model trains its head and leaves the rest."""
    net = make_convnet()
    model = nn.Sequential(FrozenFeatureExtractor(net), nn.Linear(2, 2))
    compiled = torch.compile(model, backend="aot_eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before, head = state(net), state(model[1])
    for _ in range(2):
        model.train()
        optimizer.zero_grad()
        torch.autograd.backward(compiled(IMAGES).sum())
        optimizer.step()
    assert unchanged(before, net)
    assert not unchanged(head, model[1])


@pytest.mark.usefixtures("compiler")
def test_compiled_code_refuses_a_thawed_backbone() -> None:
    """The flag is looked at in compiled code too, before and after compilation."""
    net = make_convnet()
    extractor = FrozenFeatureExtractor(net)
    compiled = torch.compile(extractor, backend="aot_eager")
    compiled(IMAGES)
    net.fc.weight.requires_grad_()
    with pytest.raises(TrainableBackboneError, match=r"fc\.weight"):
        compiled(IMAGES)
    net.fc.weight.requires_grad_(False)
    assert torch.equal(compiled(IMAGES), bare(net, IMAGES))


@pytest.mark.usefixtures("compiler")
def test_compiled_with_layers() -> None:
    """Taps run outside of the graph and give the same, call after call."""
    net, batch = make_bert(), token_batch([5, 3])
    extractor = FrozenFeatureExtractor(net, ["encoder.layer.0"], pool="mean")
    expected = extractor(**batch)["encoder.layer.0"]
    compiled = torch.compile(extractor, backend="aot_eager")
    for _ in range(3):
        torch.testing.assert_close(compiled(**batch)["encoder.layer.0"], expected)


@pytest.mark.usefixtures("compiler")
def test_a_compiled_backbone() -> None:
    """A backbone that was compiled first is frozen and run like any other."""
    net = make_convnet()
    expected = bare(net, IMAGES)
    extractor = FrozenFeatureExtractor(
        torch.compile(net, backend="aot_eager")  # type: ignore[arg-type]
    )
    extractor.train()
    torch.testing.assert_close(extractor(IMAGES), expected)
    assert not any(p.requires_grad for p in net.parameters())


# -- DistributedDataParallel -------------------------------------------------------------------


def test_inside_ddp(tmp_path: Path) -> None:
    """DDP synchronises the head alone; features and statistics stay."""
    store = f"file://{tmp_path}/store"
    dist.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    try:
        net = make_convnet()
        model = nn.Sequential(FrozenFeatureExtractor(net), nn.Linear(2, 2))
        wrapped = DistributedDataParallel(model)
        optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
        before, head = state(net), state(model[1])
        for _ in range(3):
            model.train()
            optimizer.zero_grad()
            torch.autograd.backward(wrapped(IMAGES).sum())
            optimizer.step()
        assert unchanged(before, net)
        assert not unchanged(head, model[1])
        under = FrozenFeatureExtractor(DistributedDataParallel(make_trainable()), ["0"])
        assert under(torch.ones(2, 4))["0"].shape == (2, 4)
    finally:
        dist.destroy_process_group()


def make_trainable() -> nn.Module:
    """A backbone that DDP wraps before it is frozen."""
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
