"""A zoo of tiny odd models, each with what a count by hand says of it.

A specimen's figures are written down, not computed: they are the oracle of the tests.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.utils import parametrizations
from torch.optim import Optimizer

__all__ = [
    "BY_NAME",
    "ZOO",
    "ClassToken",
    "EmptySlots",
    "Encoder",
    "ExpandedBias",
    "IntegerTable",
    "NormZoo",
    "OddNames",
    "PackedLinear",
    "Params4bit",
    "Scalars",
    "ShardedLinear",
    "SharedTwice",
    "Specimen",
    "StorageTied",
    "TiedLM",
    "batch_norm_without_affine",
    "recursive",
    "snapshot",
]


# -- a model to write patterns against ---------------------------------------------------------


class Attention(nn.Module):
    """Two projections of width 2."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(2, 2)
        self.key = nn.Linear(2, 2)


class Layer(nn.Module):
    """Attention, a norm and dropout: 16 parameters in 6 tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = Attention()
        self.LayerNorm = nn.LayerNorm(2)
        self.dropout = nn.Dropout(0.1)


class Stack(nn.Module):
    """A numbered stack of layers."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layer = nn.ModuleList(Layer() for _ in range(layers))


class Encoder(nn.Module):
    """Names like BERT's: ``embeddings``, ``encoder.layer.0`` to ``.11``, ``pooler``."""

    def __init__(self, layers: int = 12) -> None:
        super().__init__()
        self.embeddings = nn.Embedding(3, 2)
        self.encoder = Stack(layers)
        self.pooler = nn.Linear(2, 1)


# -- tied, shared, owned by the root -----------------------------------------------------------


class TiedLM(nn.Module):
    """GPT-2's tie: one Parameter is the embedding and the head."""

    def __init__(self) -> None:
        super().__init__()
        self.wte = nn.Embedding(5, 2)
        self.body = nn.Linear(2, 2)
        self.lm_head = nn.Linear(2, 5, bias=False)
        self.lm_head.weight = self.wte.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(self.lm_head(self.body(self.wte(tokens))))


class StorageTied(nn.Module):
    """Two Parameter objects over one memory, the second one transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Linear(2, 3, bias=False)
        self.decode = nn.Linear(3, 2, bias=False)
        self.decode.weight = nn.Parameter(self.encode.weight.data.t())
        self.head = nn.Linear(2, 1)


class SharedTwice(nn.Module):
    """One module at two places: twice below one parent, and once more below another."""

    def __init__(self) -> None:
        super().__init__()
        block = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
        self.first = block
        self.second = block
        self.inner = nn.ModuleDict({"third": block})
        self.head = nn.Linear(2, 1)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(self.head(self.second(self.first(inputs))))


class ClassToken(nn.Module):
    """A ViT's parameters that belong to no leaf module."""

    def __init__(self) -> None:
        super().__init__()
        self.cls_token = nn.Parameter(torch.zeros(1, 1, 2))
        self.pos_embed = nn.Parameter(torch.zeros(1, 3, 2))
        self.blocks = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        self.head = nn.Linear(2, 1)


class ParameterLists(nn.Module):
    """Parameters in a list and in a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.prompts = nn.ParameterList(nn.Parameter(torch.zeros(2)) for _ in range(4))
        self.scales = nn.ParameterDict(
            {"left": nn.Parameter(torch.ones(3)), "right": nn.Parameter(torch.ones(3))}
        )


# -- odd tensors -------------------------------------------------------------------------------


class IntegerTable(nn.Module):
    """An integer parameter, as quantised weights are kept, with its scale."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3, 2, dtype=torch.int8), requires_grad=False)
        self.scale = nn.Parameter(torch.ones(3))


class QuantizedTensor(nn.Module):
    """A weight of torch's own quantised dtype."""

    def __init__(self) -> None:
        super().__init__()
        with warnings.catch_warnings():  # deprecated, and still found in models
            warnings.simplefilter("ignore")
            packed = torch.quantize_per_tensor(torch.zeros(2, 2), 0.1, 0, torch.qint8)
        self.weight = nn.Parameter(packed, requires_grad=False)
        self.bias = nn.Parameter(torch.zeros(2))


class Scalars(nn.Module):
    """Parameters without a dimension, such as CLIP's temperature."""

    def __init__(self) -> None:
        super().__init__()
        self.logit_scale = nn.Parameter(torch.tensor(2.0))
        self.logit_bias = nn.Parameter(torch.tensor(0.5))


class ExpandedBias(nn.Module):
    """One number in memory, repeated four times."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(1).expand(4))
        self.weight = nn.Parameter(torch.zeros(2))


class HalfPrecision(nn.Module):
    """Two precisions and a complex weight."""

    def __init__(self) -> None:
        super().__init__()
        self.low = nn.Parameter(torch.zeros(4, dtype=torch.bfloat16))
        self.full = nn.Parameter(torch.zeros(4))
        self.phase = nn.Parameter(torch.zeros(2, dtype=torch.complex64))


class ShardedLinear(nn.Module):
    """What DeepSpeed's ZeRO-3 leaves behind: empty tensors that note their true size."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(0))
        self.bias = nn.Parameter(torch.empty(0))
        for tensor, shape in ((self.weight, (3, 2)), (self.bias, (3,))):
            tensor.ds_numel = torch.Size(shape).numel()  # type: ignore[attr-defined]
            tensor.ds_shape = torch.Size(shape)  # type: ignore[attr-defined]


class Params4bit(nn.Parameter):
    """Stands in for bitsandbytes' class: two 4-bit weights in a byte."""

    quant_state: Any = None


class QuantState(NamedTuple):
    """What bitsandbytes notes about a packed weight."""

    shape: torch.Size


class PackedLinear(nn.Module):
    """A 4-bit weight of 4 x 3, in 6 bytes."""

    def __init__(self) -> None:
        super().__init__()
        packed = Params4bit(torch.zeros(6, 1, dtype=torch.uint8), requires_grad=False)
        packed.quant_state = QuantState(torch.Size((4, 3)))
        self.weight = packed
        self.bias = nn.Parameter(torch.zeros(4))


class EmptySlots(nn.Module):
    """A parameter slot and a buffer slot that are both empty, as ``bias=None`` leaves them."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2))
        self.register_parameter("bias", None)
        self.register_buffer("mask", None)
        self.register_module("downsample", None)


class OddNames(nn.Module):
    """Names that a pattern, a markup language or HTML could take for its own."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleDict(
            {
                "layer[x]": nn.Linear(1, 1),
                "<b>bold</b>": nn.Linear(1, 1),
                "[red]": nn.Linear(1, 1),
                "a & b": nn.Linear(1, 1),
            }
        )
        self.head = nn.Linear(1, 1)


# -- running statistics ------------------------------------------------------------------------


class NormZoo(nn.Module):
    """Every norm that keeps running statistics, and one that keeps none."""

    def __init__(self) -> None:
        super().__init__()
        self.bn1d = nn.BatchNorm1d(2)
        self.bn2d = nn.BatchNorm2d(2)
        self.bn3d = nn.BatchNorm3d(2)
        self.sync = nn.SyncBatchNorm(2)
        self.instance = nn.InstanceNorm2d(2, affine=True, track_running_stats=True)
        self.plain_instance = nn.InstanceNorm2d(2, affine=True)
        self.layer_norm = nn.LayerNorm(2)


def batch_norm_without_affine() -> nn.Module:
    """Statistics without parameters between two layers."""
    return nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2, affine=False), nn.Linear(2, 1))


def _old_weight_norm() -> nn.Module:
    with warnings.catch_warnings():  # deprecated, and still found in checkpoints
        warnings.simplefilter("ignore", FutureWarning)
        return nn.Sequential(nn.utils.weight_norm(nn.Linear(2, 2)), nn.Linear(2, 1))


def _old_spectral_norm() -> nn.Module:
    return nn.Sequential(nn.utils.spectral_norm(nn.Linear(2, 2)), nn.Linear(2, 1))


def _spectral_norm() -> nn.Module:
    return nn.Sequential(parametrizations.spectral_norm(nn.Linear(2, 2)), nn.Linear(2, 1))


def _weight_norm() -> nn.Module:
    return nn.Sequential(parametrizations.weight_norm(nn.Linear(2, 2)), nn.Linear(2, 1))


# -- odd trees ---------------------------------------------------------------------------------


class _Recursive(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(1, 1)


def recursive() -> nn.Module:
    """A module that contains itself, one level down."""
    model = _Recursive()
    model.inner.add_module("outer", model)
    return model


def _lazy() -> nn.Module:
    return nn.Sequential(nn.LazyLinear(2), nn.LazyBatchNorm1d(), nn.Linear(2, 1))


def _meta() -> nn.Module:
    with torch.device("meta"):
        return nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 2))


def _gapped() -> nn.Module:
    return nn.ModuleDict(
        {"2": nn.Linear(1, 1), "5": nn.Linear(1, 1), "07": nn.Linear(1, 1), "08": nn.Linear(1, 1)}
    )


def _attention() -> nn.Module:
    return nn.ModuleDict(
        {"attention": nn.MultiheadAttention(2, 1, dropout=0.1), "head": nn.Linear(2, 1)}
    )


def _recurrent() -> nn.Module:
    return nn.ModuleDict({"gru": nn.GRU(2, 1, num_layers=2, dropout=0.1), "head": nn.Linear(1, 1)})


def _bert() -> nn.Module:
    from transformers import BertConfig, BertModel

    model: nn.Module = BertModel(
        BertConfig(
            vocab_size=11,
            hidden_size=4,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=8,
            max_position_embeddings=6,
        )
    )
    return model


def _gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    model: nn.Module = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=11,
            n_embd=4,
            n_layer=2,
            n_head=2,
            n_positions=6,
            bos_token_id=0,
            eos_token_id=0,
        )
    )
    return model


def _t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    model: nn.Module = T5ForConditionalGeneration(
        T5Config(vocab_size=11, d_model=4, d_kv=2, d_ff=8, num_layers=2, num_heads=2)
    )
    return model


def _llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    model: nn.Module = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=11,
            hidden_size=4,
            intermediate_size=8,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
        )
    )
    return model


# -- looking at a model ------------------------------------------------------------------------


def snapshot(model: nn.Module, optimizer: Optimizer | None = None) -> dict[str, list[object]]:
    """All that freezing may change: flags, gradients, modes, holds, groups, state.

    Tensors and methods are told by identity; two snapshots of an untouched model are equal.
    """
    held = []
    for name, module in model.named_modules(remove_duplicate=False):
        train = module.__dict__.get("train")
        held.append((name, module.training, id(train), getattr(train, "requested", None)))
    found: dict[str, list[object]] = {
        "parameters": [
            (name, id(p), p.requires_grad, id(p.grad) if p.is_leaf else None)
            for name, p in model.named_parameters(remove_duplicate=False)
        ],
        "modes": [*held],
    }
    if optimizer is not None:
        found["groups"] = [
            [(key, list(map(id, value)) if key == "params" else value) for key, value in g.items()]
            for g in optimizer.param_groups
        ]
        found["state"] = [(id(key), id(value)) for key, value in optimizer.state.items()]
    return found


# -- the zoo -----------------------------------------------------------------------------------


class Specimen(NamedTuple):
    """A model, and what a count by hand says of it.

    Attributes:
        name: what it is called in test ids.
        make: makes a fresh one.
        tensors: parameter tensors, each memory once.
        numel: their elements; of lazy ones 0.
        nbytes: their bytes as stored.
        untrainable: elements that can never require a gradient.
        held: modules with running statistics, that a freeze of everything holds in eval.
    """

    name: str
    make: Callable[[], nn.Module]
    tensors: int
    numel: int
    nbytes: int
    untrainable: int = 0
    held: int = 0


# BERT: 24 embeddings rows and 2 norms; per layer 4 projections, 2 norms, 2 feed-forwards.
_BERT_LAYER = 4 * (4 * 4 + 4) + 2 * 8 + (4 * 8 + 8) + (8 * 4 + 4)
_BERT_NUMEL = (11 + 6 + 2) * 4 + 8 + 2 * _BERT_LAYER + (4 * 4 + 4)
# GPT-2: the head is the token embedding.
_GPT2_LAYER = 2 * 8 + (4 * 12 + 12) + (4 * 4 + 4) + (4 * 16 + 16) + (16 * 4 + 4)
_GPT2_NUMEL = (11 + 6) * 4 + 2 * _GPT2_LAYER + 8
# T5: no biases; the norms scale only; one table of relative positions (32 x 2) per stack.
_T5_ATTENTION = 4 * (4 * 4)
_T5_ENCODER = 2 * (_T5_ATTENTION + 4 + 2 * 4 * 8 + 4) + 32 * 2 + 4
_T5_DECODER = 2 * (2 * (_T5_ATTENTION + 4) + 2 * 4 * 8 + 4) + 32 * 2 + 4
_T5_NUMEL = 11 * 4 + _T5_ENCODER + _T5_DECODER
# Llama: one key and value head for two query heads; an untied head.
_LLAMA_LAYER = 2 * 4 * 4 + 2 * 2 * 4 + 3 * 4 * 8 + 2 * 4
_LLAMA_NUMEL = 11 * 4 + 2 * _LLAMA_LAYER + 4 + 11 * 4

ZOO: tuple[Specimen, ...] = (
    Specimen("encoder", Encoder, 3 + 12 * 6, 9 + 12 * 16, 4 * (9 + 12 * 16)),
    Specimen("tied", TiedLM, 3, 16, 64),
    Specimen("storage-tied", StorageTied, 3, 9, 36),
    Specimen("shared-twice", SharedTwice, 6, 13, 52, held=1),
    Specimen("class-token", ClassToken, 8, 23, 92),
    Specimen("parameter-lists", ParameterLists, 6, 14, 56),
    Specimen("integers", IntegerTable, 2, 9, 6 + 12, untrainable=6),
    Specimen("quantized-tensor", QuantizedTensor, 2, 6, 4 + 8, untrainable=4),
    Specimen("scalars", Scalars, 2, 2, 8),
    Specimen("expanded", ExpandedBias, 2, 6, 4 + 8),
    Specimen("half-precision", HalfPrecision, 3, 10, 8 + 16 + 16),
    Specimen("zero-3", ShardedLinear, 2, 9, 36),
    Specimen("four-bit", PackedLinear, 2, 16, 6 + 16, untrainable=12),
    Specimen("empty-slots", EmptySlots, 1, 2, 8),
    Specimen("odd-names", OddNames, 10, 10, 40),
    Specimen("norms", NormZoo, 14, 28, 112, held=5),
    Specimen("batch-norm-without-affine", batch_norm_without_affine, 4, 9, 36, held=1),
    Specimen("batch-norm-alone", lambda: nn.BatchNorm1d(2), 2, 4, 16, held=1),
    Specimen("old-weight-norm", _old_weight_norm, 5, 11, 44),
    Specimen("old-spectral-norm", _old_spectral_norm, 4, 9, 36, held=1),
    Specimen("spectral-norm", _spectral_norm, 4, 9, 36, held=1),
    Specimen("weight-norm", _weight_norm, 5, 11, 44),
    Specimen("lazy", _lazy, 6, 3, 12, held=1),
    Specimen("meta", _meta, 6, 16, 64, held=1),
    Specimen("gapped-numbers", _gapped, 8, 8, 32),
    Specimen("attention", _attention, 6, 27, 108),
    Specimen("recurrent", _recurrent, 10, 29, 116),
    Specimen("bert", _bert, 5 + 2 * 16 + 2, _BERT_NUMEL, 4 * _BERT_NUMEL),
    Specimen("gpt2", _gpt2, 2 + 2 * 12 + 2, _GPT2_NUMEL, 4 * _GPT2_NUMEL),
    Specimen("t5", _t5, 1 + 2 * 8 + 2 + 2 * 13 + 2, _T5_NUMEL, 4 * _T5_NUMEL),
    Specimen("llama", _llama, 3 + 2 * 9, _LLAMA_NUMEL, 4 * _LLAMA_NUMEL),
)

BY_NAME: dict[str, Specimen] = {specimen.name: specimen for specimen in ZOO}
