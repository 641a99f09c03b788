"""Pooling of token features: the mask decides, on whichever side the padding is."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutput

from features.features_support import bare, make_bert, make_gpt2, token_batch
from freezekit import FrozenFeatureExtractor
from freezekit._features.pooling import pool_tokens, token_features

POOLS: list[Any] = ["cls", "mean", "max", "last_token"]


def by_hand(pool: str, rows: Tensor) -> Tensor:
    """The pool of one sample's tokens, (length, width), without any padding."""
    return {
        "cls": rows[0],
        "mean": rows.mean(0),
        "max": rows.max(0).values,
        "last_token": rows[-1],
    }[pool]


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 6), min_size=1, max_size=4),
    side=st.sampled_from(["left", "right"]),
    pool=st.sampled_from(POOLS),
    rubbish=st.sampled_from([0.0, 1e30, float("nan"), float("inf")]),
    seed=st.integers(0, 1000),
)
def test_what_stands_in_the_padding_never_matters(
    lengths: list[int], side: str, pool: Any, rubbish: float, seed: int
) -> None:
    """Law: the pool of a padded batch is the pool of each sample alone."""
    mask = token_batch(lengths, side=side)["attention_mask"]
    torch.manual_seed(seed)
    tokens = torch.randn(*mask.shape, 3)
    expected = torch.stack(
        [by_hand(pool, row[keep.bool()]) for row, keep in zip(tokens, mask, strict=True)]
    )
    dirty = tokens.masked_fill(~mask.bool().unsqueeze(2), rubbish)
    for given_mask in (mask, mask.bool(), mask.float()):
        torch.testing.assert_close(pool_tokens(pool, dirty, given_mask), expected)


@pytest.mark.parametrize("pool", POOLS)
def test_without_a_mask_every_position_counts(pool: Any) -> None:
    """No mask: no padding."""
    tokens = torch.randn(2, 5, 3)
    expected = torch.stack([by_hand(pool, row) for row in tokens])
    torch.testing.assert_close(pool_tokens(pool, tokens, None), expected)


@pytest.mark.parametrize("pool", POOLS)
def test_a_sample_without_a_token_is_nan(pool: Any) -> None:
    """Nothing to pool is not zero, and does not disturb the other samples."""
    pooled = pool_tokens(pool, torch.ones(2, 3, 4), torch.tensor([[0, 0, 0], [1, 1, 0]]))
    assert pooled[0].isnan().all()
    assert torch.equal(pooled[1], torch.ones(4))


def test_means_in_half_precision_are_summed_in_float32() -> None:
    """4,096 tokens of 20 sum to more than float16 holds; their mean is 20."""
    tokens = torch.full((1, 4096, 1), 20.0, dtype=torch.float16)
    for mask in (None, torch.ones(1, 4096)):
        pooled = pool_tokens("mean", tokens, mask)
        assert pooled.dtype == torch.float16
        assert pooled.item() == 20


@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize("side", ["right", "left"])
def test_pooled_features_of_a_model(pool: Any, side: str) -> None:
    """The mask is found among keywords and positions; pooled is the last hidden state."""
    net, batch = make_bert(), token_batch([5, 2, 4], side=side)
    hidden = bare(net, **batch).last_hidden_state
    expected = torch.stack(
        [by_hand(pool, h[m.bool()]) for h, m in zip(hidden, batch["attention_mask"], strict=True)]
    )
    extractor = FrozenFeatureExtractor(net, pool=pool)
    torch.testing.assert_close(extractor(**batch), expected)
    torch.testing.assert_close(extractor(batch["input_ids"], batch["attention_mask"]), expected)


def test_pooled_layers() -> None:
    """Each layer is pooled by itself, under its name."""
    net, batch = make_gpt2(), token_batch([5, 2])
    states = bare(net, **batch, output_hidden_states=True).hidden_states
    got = FrozenFeatureExtractor(net, ["h.0", "wte"], pool="last_token")(**batch)
    assert list(got) == ["h.0", "wte"]
    torch.testing.assert_close(got["h.0"], torch.stack([states[1][0, 4], states[1][1, 1]]))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_masks_of_torchs_own_encoder_tell_what_to_leave_out() -> None:
    """``src_key_padding_mask`` is true, or minus infinity, where there is nothing.

    Its nested tensors cut off positions that are padding in every row.
    """
    layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True, dropout=0.0)
    net = nn.TransformerEncoder(layer, 1)
    batch = torch.randn(2, 5, 4)
    padding = torch.tensor([[False, False, True, True, True], [False, False, False, True, True]])
    extractor = FrozenFeatureExtractor(net, pool="mean")
    alone = [bare(net, batch[i : i + 1, :n])[0].mean(0) for i, n in enumerate((2, 3))]
    got = extractor(batch, src_key_padding_mask=padding)
    torch.testing.assert_close(got, torch.stack(alone), rtol=1e-4, atol=1e-5)
    infinite = torch.zeros(2, 5).masked_fill(padding, -torch.inf)
    again = extractor(batch, src_key_padding_mask=infinite)
    torch.testing.assert_close(again, torch.stack(alone), rtol=1e-4, atol=1e-5)


def test_a_callable_is_given_features_and_mask() -> None:
    """What it returns is the feature, without a graph."""
    net, batch = make_bert(), token_batch([5, 2])

    def first_and_last(tokens: Tensor, mask: Tensor | None) -> Tensor:
        assert mask is not None
        last = mask.sum(1) - 1
        return torch.cat([tokens[:, 0], tokens[torch.arange(len(tokens)), last]], 1)

    got = FrozenFeatureExtractor(net, pool=first_and_last)(**batch)
    hidden = bare(net, **batch).last_hidden_state
    assert torch.equal(got[1], torch.cat([hidden[1, 0], hidden[1, 1]]))


@pytest.mark.parametrize(
    "output",
    [
        torch.ones(1, 2, 3),
        (torch.ones(1, 2, 3), None),
        BaseModelOutput(last_hidden_state=torch.ones(1, 2, 3)),
        {"features": torch.ones(1, 2, 3)},
    ],
    ids=["tensor", "tuple", "output", "dict"],
)
def test_where_token_features_are_found(output: object) -> None:
    """A tensor, the last hidden state, or the first tensor there is."""
    assert token_features(output).shape == (1, 2, 3)


@pytest.mark.parametrize(
    ("tokens", "mask", "words"),
    [
        (torch.ones(2, 5, 3), torch.ones(2, 4), "the mask has 4 positions, the features have 5"),
        (torch.ones(2, 5, 3), torch.ones(2, 1, 5, 5), "expected a mask of shape"),
        (torch.ones(2, 5, 3), torch.ones(2, 6), "adds or merges tokens"),
    ],
)
def test_masks_that_do_not_fit(tokens: Tensor, mask: Tensor, words: str) -> None:
    """A mask for other positions is not cut to size in silence."""
    with pytest.raises(ValueError, match=words):
        pool_tokens("mean", tokens, mask)


def test_features_that_are_no_tokens() -> None:
    """A map of pixels, or no tensor at all, is refused with its shape or class."""
    extractor = FrozenFeatureExtractor(nn.Conv2d(3, 4, 3), pool="mean")
    with pytest.raises(ValueError, match=r"from the backbone, got the shape \(1, 4, 6, 6\)"):
        extractor(torch.randn(1, 3, 8, 8))
    with pytest.raises(ValueError, match="returns no tensor, but a str"):
        token_features("text")
