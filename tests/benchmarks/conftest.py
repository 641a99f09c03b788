"""What the tests of the benchmark share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from transformers import BertConfig, BertModel

from _four_combos.model import BERTGRUSentiment
from benchmarks.four_combos_support import MakeTiny, SilentProgress


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Two threads on operations as small as these wait for each other more than they work."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def make_tiny() -> MakeTiny:
    """Make the tutorial's model with a two-layer BERT of width 16 and a GRU of width 4."""

    def make(attention: str = "sdpa") -> BERTGRUSentiment:
        torch.manual_seed(0)
        config = BertConfig(
            vocab_size=50,
            hidden_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=32,
            max_position_embeddings=32,
            attn_implementation=attention,
        )
        return BERTGRUSentiment(BertModel(config), hidden=4)

    return make


@pytest.fixture
def progress() -> SilentProgress:
    """Take note of progress in silence."""
    return SilentProgress()
