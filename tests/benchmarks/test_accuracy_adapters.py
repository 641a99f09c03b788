"""Adapters of peft's method comparison: every type that peft offers, and what names say."""

from __future__ import annotations

import dataclasses
from importlib.util import find_spec
from typing import Any

import pytest
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING
from torch import nn

from _accuracy.adapters import (
    Experiment,
    begin_training,
    build,
    estimate_experiment,
    read_experiment,
)

SMALL: dict[str, Any] = {
    "vocab_size": 1000,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 32,
}
LORA = Experiment(
    name="lora/llama-3.2-3B-rank4",
    peft_type="LORA",
    rank=4,
    targets=("q_proj", "v_proj"),
    optimizer="AdamW",
    fp32_adapters=True,
    trainable=0,
    measured=1,
)
# What a type needs that is not here.
NEEDS = {
    "ADAMSS": "scikit-learn is required",
    "XLORA": "`use_cache` must be False",
}
pytestmark = pytest.mark.filterwarnings("ignore")


def trainable(model: nn.Module) -> int:
    """Parameters that learn."""
    return sum(p.numel() for p in model.parameters() if p.requires_grad)


@pytest.mark.parametrize("peft_type", [kind.value for kind in PEFT_TYPE_TO_CONFIG_MAPPING])
def test_every_type_builds_or_says_why_not(peft_type: str) -> None:
    """Each type of the installed peft: an adapter with something to learn, or its own words."""
    targets = () if peft_type == "ADAPTION_PROMPT" else LORA.targets
    experiment = dataclasses.replace(LORA, peft_type=peft_type, rank=None, targets=targets)
    if peft_type == "ADAMSS" and find_spec("sklearn") is not None:
        pytest.skip("it clusters real weights")
    if peft_type in NEEDS:
        with pytest.raises(ValueError, match=f"does not build {peft_type} .*{NEEDS[peft_type]}"):
            build(experiment, **SMALL)
        return
    model = build(experiment, **SMALL)
    assert trainable(model) > 0 or peft_type == "TRAINABLE_TOKENS"


def test_an_unknown_type_is_an_error() -> None:
    """With the nearest that there is."""
    with pytest.raises(ValueError, match=r"no adapter of type 'LORAX'; did you mean '\w+'"):
        build(dataclasses.replace(LORA, peft_type="LORAX"), **SMALL)


@pytest.mark.parametrize(
    ("name", "learns"),
    [
        pytest.param("rank4", 2 * 2 * 2 * 4 * 256, id="rank"),
        pytest.param("rank4-dora", 2 * 2 * (2 * 4 * 256 + 256), id="dora"),
        pytest.param("rank4-mica", 2 * 2 * 4 * 256, id="one-factor-learns"),
    ],
)
def test_a_name_says_what_columns_do_not(name: str, learns: int) -> None:
    """Two layers, two targets, two factors of 4 times 256."""
    experiment = dataclasses.replace(LORA, name=f"lora/llama-3.2-3B-{name}")
    assert trainable(build(experiment, **SMALL)) == learns


def test_an_optimizer_that_freezes_a_factor() -> None:
    """LoRA-FA learns the second factor only; the base model's pass unfreezes the first again."""
    experiment = dataclasses.replace(LORA, optimizer="lora-fa")
    model = build(experiment, **SMALL)
    one_factor = 2 * 2 * 4 * 256
    assert trainable(model) == one_factor
    optimizer = begin_training(model)
    assert trainable(model) == 2 * one_factor
    assert sum(p.numel() for group in optimizer.param_groups for p in group["params"]) == one_factor


def test_full_fine_tuning_takes_more_than_an_adapter() -> None:
    """And longer rows take more than shorter ones."""
    full = dataclasses.replace(LORA, peft_type="FULL", rank=None, targets=())
    sizes = []
    for experiment, length in ((LORA, 64), (full, 64), (full, 512)):
        model = build(experiment, **SMALL)
        sizes.append(estimate_experiment(model, begin_training(model), experiment, length))
    assert sizes[0] < sizes[1] < sizes[2]


def test_a_row_is_read_by_its_columns() -> None:
    """Empty cells are no rank and no targets."""
    record = {
        "experiment": "full",
        "peft_type": "FULL",
        "r": "",
        "target_modules": "",
        "optimizer": "AdamW",
        "autocast_adapter_dtype": "True",
        "num_trainable_params": "7",
        "peak_reserved_bytes": "9",
    }
    expected = Experiment("full", "FULL", None, (), "AdamW", True, 7, 9)
    assert read_experiment(record) == expected
