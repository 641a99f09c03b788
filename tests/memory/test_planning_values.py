"""What BERT-base keeps for the backward pass, by where the trainable parameters are."""

from __future__ import annotations

import pytest
import torch
from transformers import BertConfig, BertModel

from freezekit import freeze, train_only
from freezekit._memory.recorder import Recorder
from freezekit._memory.shadow import Shadow
from freezekit._memory.steps import Steps, run_steps

MIB = 1 << 20
# MiB for one text of 512 tokens, eager attention, counted on the CPU (its dropout keeps floats):
# measured on real tensors, by others too.
KEPT = {
    "everything": 759,
    "only biases": 633,
    "only layer 0": 641,
    "only layer 11": 63,
    "front 0": 756,
    "front 3": 567,
    "front 6": 378,
    "front 9": 189,
    "front 11": 63,
    "front 12": 0,
}


def kept(model: BertModel) -> int:
    """Bytes of activations alive after one forward pass."""
    shadow, recorder = Shadow(), Recorder()
    ids = torch.empty(1, 512, dtype=torch.long, device="meta")
    with shadow.mode:
        twin = shadow.copy(model)
        stream = run_steps(
            recorder, twin, shadow.inputs(ids), Steps(count=1, loss=lambda out: out[0].sum())
        )
    live: dict[int, int] = {}
    for event in stream.events:
        if event.phase == "backward":
            break
        if event.is_alloc:
            live[event.allocation] = stream.allocations[event.allocation].nbytes
        else:
            live.pop(event.allocation, None)
    return sum(
        nbytes
        for index, nbytes in live.items()
        if stream.allocations[index].category == "activations"
    )


@pytest.fixture(scope="module")
def bert() -> BertModel:
    """Without data."""
    with torch.device("meta"):
        return BertModel(BertConfig(attn_implementation="eager"), add_pooling_layer=False)


@pytest.mark.parametrize("case", KEPT)
def test_bert_base(bert: BertModel, case: str) -> None:
    """The same number of trainable parameters, ten times the memory, by their place."""
    what, _, number = case.partition(" ")
    bert.requires_grad_(requires_grad=True)
    if case == "front 12":
        bert.requires_grad_(requires_grad=False)
    elif what == "front":
        freeze(bert, ["embeddings", f"encoder.layer[:{number}]"] if number != "0" else "embeddings")
    elif case == "only biases":
        train_only(bert, "*.bias")
    elif what == "only":
        train_only(bert, f"encoder.layer.{number.rpartition(' ')[2]}")
    # The output is kept by whoever holds it: 1.5 MiB.
    assert kept(bert) / MIB == pytest.approx(KEPT[case], abs=2.0)
