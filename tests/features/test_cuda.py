"""On a GPU: cuDNN's RNNs, features kept from there, and an identity that does not depend on it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from features.features_support import make_bert, token_batch
from features.store_support import Counting, expected, make_batches
from freezekit import FrozenFeatureExtractor, extract_features
from freezekit._features.identity import identify

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


def test_a_recurrent_backbone_on_cudnn() -> None:
    """Held in eval, cuDNN would refuse a backward: none enters, and the head learns."""
    net = nn.LSTM(4, 6, num_layers=2, dropout=0.5, batch_first=True).cuda()
    extractor = FrozenFeatureExtractor(net)
    extractor.train()
    batch = torch.randn(3, 5, 4, device="cuda")
    head = nn.Linear(6, 1).cuda()
    features = extractor(batch)[0]
    torch.autograd.backward(head(features).sum())
    assert head.weight.grad is not None
    assert torch.equal(extractor(batch)[0], features)


def test_the_identity_is_the_same_on_every_device() -> None:
    """The same weights on a GPU: the same key."""

    def key(net: nn.Module) -> dict[str, str]:
        extractor = FrozenFeatureExtractor(net)
        return identify(extractor, stored_dtype="", preprocessing=None, columns="")

    assert key(make_bert().cuda()) == key(make_bert())


def test_batches_are_moved_to_the_backbone(tmp_path: Path) -> None:
    """Batches from the CPU, a backbone on the GPU, features on disk."""
    extractor = FrozenFeatureExtractor(Counting().cuda())
    dataset = extract_features(
        extractor, make_batches(), tmp_path / "a", keys="labels", progress=False
    )
    torch.testing.assert_close(
        dataset[:]["features"], expected(make_batches()), rtol=1e-3, atol=1e-3
    )
    packed = FrozenFeatureExtractor(make_bert().cuda(), layers="encoder.layer.0")
    tokens = extract_features(packed, [token_batch([5, 3])], tmp_path / "b", progress=False)
    assert tokens[1]["encoder.layer.0"].shape == (3, 16)


def test_autocast_on_a_gpu() -> None:
    """Half-precision casts of frozen weights leave no trace in what trains."""
    extractor = FrozenFeatureExtractor(nn.Linear(4, 4).cuda())
    head = nn.Linear(4, 1).cuda()
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss = head(extractor(torch.randn(2, 4, device="cuda"))).float().sum()
    torch.autograd.backward(loss)
    assert head.weight.grad is not None
