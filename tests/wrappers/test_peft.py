"""peft: base weights keep their names, adapters have their own, and both freeze as asked."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from typing import Any

import peft
import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from transformers import BertConfig, BertForSequenceClassification

import freezekit
from wrappers.wrappers_support import bits, flags, make_optimizer, moved

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def make_bert() -> nn.Module:
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=30,
        hidden_size=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=16,
        max_position_embeddings=16,
    )
    model: nn.Module = BertForSequenceClassification(config)
    return model


BASE_NAMES = [name for name, _ in make_bert().named_parameters()]

LORA = {"r": 2, "target_modules": ["query", "value"]}

# They say nothing of a task, so that the classifier is left as it is.
PROMPT = {
    "task_type": "FEATURE_EXTRACTION",
    "num_layers": 2,
    "token_dim": 8,
    "num_attention_heads": 2,
    "num_transformer_submodules": 1,
}

ADAPTERS: dict[str, Callable[[], Any]] = {
    "LoRA": lambda: peft.LoraConfig(**LORA),
    "LoRA of all linears": lambda: peft.LoraConfig(r=2, target_modules="all-linear"),
    "LoRA of embeddings": lambda: peft.LoraConfig(r=2, target_modules=["word_embeddings", "query"]),
    "DoRA": lambda: peft.LoraConfig(use_dora=True, **LORA),
    "IA3": lambda: peft.IA3Config(target_modules=["key", "dense"], feedforward_modules=["dense"]),
    "LoHa": lambda: peft.LoHaConfig(r=2, target_modules=["query"]),
    "AdaLoRA": lambda: peft.AdaLoraConfig(target_modules=["query"], total_step=10),
    "OFT": lambda: peft.OFTConfig(target_modules=["query"], oft_block_size=4),
    "VeRA": lambda: peft.VeraConfig(r=2, target_modules=["query"]),
    "trainable tokens": lambda: peft.TrainableTokensConfig(
        token_indices=[1, 2], target_modules=["word_embeddings"]
    ),
    "prompt tuning": lambda: peft.PromptTuningConfig(num_virtual_tokens=2, **PROMPT),
    "prefix tuning": lambda: peft.PrefixTuningConfig(num_virtual_tokens=2, **PROMPT),
    "p-tuning": lambda: peft.PromptEncoderConfig(
        num_virtual_tokens=2, encoder_hidden_size=8, **PROMPT
    ),
    "LoRA for classification": lambda: peft.LoraConfig(task_type="SEQ_CLS", **LORA),
    "LoRA and whole modules": lambda: peft.LoraConfig(modules_to_save=["pooler"], **LORA),
    "LoRA and trainable tokens": lambda: peft.LoraConfig(
        trainable_token_indices={"word_embeddings": [1, 2]}, **LORA
    ),
}

adapted = pytest.mark.parametrize("make_config", ADAPTERS.values(), ids=ADAPTERS)


def adapt(make_config: Callable[[], Any], model: nn.Module | None = None) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peft's own advice about the configurations
        base = make_bert() if model is None else model
        made: nn.Module = peft.get_peft_model(base, make_config())
    return made


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    batch = {"input_ids": torch.randint(0, 30, (2, 5)), "labels": torch.tensor([0, 1])}
    model.train()
    for _ in range(2):
        optimizer.zero_grad()
        model(**batch).loss.backward()
        optimizer.step()


# -- names --------------------------------------------------------------------------------------


@adapted
def test_names_of_the_base_model(make_config: Callable[[], Any]) -> None:
    """Every parameter's name in the base model selects something in the adapted one."""
    model = adapt(make_config)
    missing = []
    for name in BASE_NAMES:
        try:
            freezekit.select(model, name)
        except freezekit.errors.UnmatchedPatternError:
            missing.append(name)
    assert missing == []


@adapted
def test_names_as_peft_prints_them(make_config: Callable[[], Any]) -> None:
    """Every name that ``named_parameters`` prints selects that one tensor."""
    model = adapt(make_config)
    for raw, parameter in model.named_parameters():
        (name,) = freezekit.select(model, raw).parameters
        assert freezekit.select(model, raw).numel == parameter.numel()
        assert freezekit.select(model, name).parameters == (name,)


@adapted
def test_freeze_of_an_adapted_model(make_config: Callable[[], Any]) -> None:
    """What peft froze is reported as frozen, and its state makes another model just so."""
    model = adapt(make_config)
    state = freezekit.freeze_state(model)
    assert len(state["trainable"]) == sum(flags(model).values())
    other = adapt(make_config)
    freezekit.unfreeze(other)
    freezekit.load_freeze_state(other, state)
    assert flags(other) == flags(model)


def test_index_among_names_as_peft_prints_them() -> None:
    """A printed name may have an index in the place of a number."""
    model = adapt(ADAPTERS["LoRA"])
    pattern = "base_model.model.bert.encoder.layer[0].attention.self.query.base_layer.weight"
    assert freezekit.select(model, pattern).parameters == (
        "bert.encoder.layer.0.attention.self.query.weight",
    )


@pytest.mark.parametrize("pattern", ["*model*", "*base*", "*layer*"])
def test_a_glob_that_reads_like_peft(pattern: str) -> None:
    """A glob selects base weights of an adapted model just where it does in the base model."""
    base = make_bert()
    base.add_module("base_head", nn.Linear(8, 2))
    base.add_module("model_head", nn.Linear(8, 2))
    expected = freezekit.select(base, pattern).parameters
    found = freezekit.select(adapt(ADAPTERS["LoRA"], base), pattern).parameters
    assert [name for name in found if "lora_" not in name] == list(expected)


def compiled(module: nn.Module) -> nn.Module:
    wrapper: nn.Module = torch.compile(module, backend="eager")  # type: ignore[assignment]
    return wrapper


NESTINGS: dict[str, Callable[[], nn.Module]] = {
    "DDP of peft": lambda: DistributedDataParallel(adapt(ADAPTERS["LoRA"])),
    "compiled peft": lambda: compiled(adapt(ADAPTERS["LoRA"])),
    "compiled DDP of peft": lambda: compiled(DistributedDataParallel(adapt(ADAPTERS["LoRA"]))),
    "peft of compiled": lambda: adapt(ADAPTERS["LoRA"], compiled(make_bert())),
}


@pytest.mark.usefixtures("process_group", "compiler")
@pytest.mark.parametrize("make", NESTINGS.values(), ids=NESTINGS)
def test_nested_with_other_wrappers(make: Callable[[], nn.Module]) -> None:
    """Through peft and other wrappers at once, names and freeze are those of peft alone."""
    alone, nested = adapt(ADAPTERS["LoRA"]), make()
    assert freezekit.select(nested).parameters == freezekit.select(alone).parameters
    freezekit.train_only(alone, ["*lora_*", "bert.pooler", "bert.encoder.layer[-1].output"])
    freezekit.load_freeze_state(nested, freezekit.freeze_state(alone))
    assert freezekit.freeze_state(nested) == freezekit.freeze_state(alone)


# -- training -----------------------------------------------------------------------------------


def test_adapters_alone_learn() -> None:
    """``train_only`` of the adapters moves them, and not a bit of the base model."""
    model = adapt(ADAPTERS["LoRA"])
    freezekit.unfreeze(model)
    freezekit.train_only(model, "*lora_*")
    before = bits(model)
    train(model, make_optimizer(model))
    assert moved(before, model) == {name for name in before if "lora_" in name}


def test_base_weight_under_an_adapter() -> None:
    """A layer's name takes its adapter too, its weight's name the base weight alone."""
    model = adapt(ADAPTERS["LoRA"])
    query = "bert.encoder.layer.0.attention.self.query"
    assert freezekit.select(model, query).parameters == (
        f"{query}.weight",
        f"{query}.bias",
        f"{query}.lora_A.default.weight",
        f"{query}.lora_B.default.weight",
    )
    assert freezekit.unfreeze(model, f"{query}.weight").changed == (f"{query}.weight",)
    assert freezekit.select(model, rf"re:{re.escape(query)}\.lora_.*").numel == 2 * (2 * 8)


def test_merged_back() -> None:
    """The freeze of the base weights loads into the model that comes out of merging."""
    model = adapt(ADAPTERS["LoRA"])
    freezekit.unfreeze(model, "bert.pooler")
    state = freezekit.freeze_state(model)
    assert isinstance(model, peft.PeftModel)
    merged = model.merge_and_unload()
    for key in ("trainable", "frozen"):
        state[key] = [name for name in state[key] if "lora_" not in name]
    freezekit.load_freeze_state(merged, state)
    assert [name for name, flag in flags(merged).items() if flag] == [
        "bert.pooler.dense.weight",
        "bert.pooler.dense.bias",
    ]


class ConvNet(nn.Module):
    """Convolutions with statistics, to be adapted."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.head = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.head(self.norm(self.conv(x)).mean((2, 3)))
        return result


@pytest.mark.parametrize("saved", [None, ["head"], ["norm"]], ids=["LoRA", "head", "norm"])
def test_statistics_of_the_base_model(saved: list[str] | None) -> None:
    """The statistics of what peft freezes move; freezekit finds and holds them."""
    config = peft.LoraConfig(r=2, target_modules=["conv"], modules_to_save=saved)
    model = adapt(lambda: config, ConvNet()).train()
    found = [finding for finding in freezekit.audit(model).findings if finding.code == "FK201"]
    assert len(found) == 1
    freezekit.freeze(model, "norm")
    before = bits(model)
    optimizer = make_optimizer(model)
    model.train()
    model(torch.randn(2, 3, 5, 5) * 3 + 1).sum().backward()
    optimizer.step()
    assert not any("norm" in name for name in moved(before, model))
    assert any("lora_" in name for name in moved(before, model))
