"""Models of a session from configs, at full size or small enough for a test on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits

import freezekit
from _four_combos.combos import COMBINATIONS, apply
from _four_combos.model import BERTGRUSentiment
from _gpu_session.configs import Config

__all__ = ["Setup", "build"]

CLASSES = 10


@dataclass(frozen=True, slots=True)
class Setup:
    """A model, what goes in, and how the loss is made (``None``: the output's own)."""

    model: nn.Module
    inputs: Any
    loss: Callable[[Any], torch.Tensor] | None


def build(config: Config, device: str, *, small: bool) -> Setup:
    """Build a configuration; on the meta device without data."""
    batch, length = (2, 32) if small else (config.batch, config.length)
    if config.model in ("tutorial", "gru", "extractor"):
        return _tutorial(config, device, batch, length, small=small)
    make, front, last, norms = _MODELS[config.model]
    with torch.device(device):
        model = make(small, config.attention)
    if config.precision == "bf16":
        model = model.to(torch.bfloat16)
    if config.checkpointed:
        # Renamed in transformers 5.
        older = model.gradient_checkpointing_enable
        getattr(model, "activation_checkpointing_enable", older)({"use_reentrant": False})
    if config.frozen == "front":
        freezekit.freeze(model, front)
    elif config.frozen == "all but last":
        freezekit.train_only(model, last, norm_stats="hold")
    elif config.frozen == "all but norms":
        freezekit.train_only(model, norms, norm_stats="keep")
    return Setup(model.train(), _inputs(config, model, device, batch, length), None)


def _tutorial(config: Config, device: str, batch: int, length: int, *, small: bool) -> Setup:
    options = {**_SMALL, "vocab_size": 100} if small else {}
    with torch.device(device):
        bert = transformers.BertModel(
            transformers.BertConfig(**options, attn_implementation=config.attention)
        )
        model = BERTGRUSentiment(bert, hidden=8 if small else 256)
        ids = torch.randint(0, bert.config.vocab_size, (batch, length))
        labels = torch.ones(batch)
    key = config.combination if config.combination in tuple("abcd") else "a"
    apply(next(each for each in COMBINATIONS if each.key == key), model)
    return Setup(model, ids, lambda logits: binary_cross_entropy_with_logits(logits, labels))


def _inputs(
    config: Config, model: Any, device: str, batch: int, length: int
) -> dict[str, torch.Tensor]:
    with torch.device(device):
        if config.model in _IMAGES:
            dtype = torch.bfloat16 if config.precision == "bf16" else torch.float32
            pixels = torch.zeros(batch, 3, length, length, dtype=dtype)
            return {"pixel_values": pixels, "labels": torch.zeros(batch, dtype=torch.long)}
        ids = torch.randint(0, model.config.vocab_size, (batch, length))
        mask = torch.ones_like(ids)
        labels = torch.zeros(batch, dtype=torch.long) if config.model == "bert" else ids
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


# -- models ------------------------------------------------------------------------------------

_SMALL: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
}
_IMAGES = frozenset({"vit", "resnet50", "resnet101", "convnext", "mobilenet"})


def _of(
    config_class: str, model_class: str, full: dict[str, Any], small: dict[str, Any]
) -> Callable[[bool, str], Any]:
    def make(is_small: bool, attention: str) -> Any:  # noqa: FBT001
        options = {**full, **small} if is_small else dict(full)
        if config_class in _CHOOSES_ATTENTION:
            options["attn_implementation"] = attention
        config = getattr(transformers, config_class)(**options)
        return getattr(transformers, model_class)(config)

    return make


_CHOOSES_ATTENTION = frozenset({"BertConfig", "GPT2Config", "LlamaConfig", "ViTConfig"})
_LLAMA: dict[str, Any] = {
    "vocab_size": 32_000,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}
_LABELS: dict[str, Any] = {"num_labels": CLASSES}
_RESNET_SMALL: dict[str, Any] = {"embedding_size": 8, "hidden_sizes": [8, 16, 16, 16]}

# How it is made; patterns of its front, of its last part, and of its norms.
_MODELS: dict[str, tuple[Callable[[bool, str], Any], list[str], list[str], list[str]]] = {
    "bert": (
        _of(
            "BertConfig",
            "BertForSequenceClassification",
            {},
            {**_SMALL, "vocab_size": 100},
        ),
        ["bert.embeddings", "bert.encoder.layer[:1]"],
        ["bert.encoder.layer[-1:]", "classifier"],
        ["*LayerNorm*"],
    ),
    "gpt2": (
        _of(
            "GPT2Config",
            "GPT2LMHeadModel",
            {},
            {"n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": 100, "n_positions": 64},
        ),
        ["transformer.wpe", "transformer.h[:1]"],
        ["transformer.h[-1:]", "transformer.ln_f"],
        ["*.ln_1", "*.ln_2", "transformer.ln_f"],
    ),
    "llama": (
        _of(
            "LlamaConfig",
            "LlamaForCausalLM",
            _LLAMA,
            {**_SMALL, "num_key_value_heads": 1, "vocab_size": 100},
        ),
        ["model.embed_tokens", "model.layers[:1]"],
        ["model.layers[-1:]", "lm_head"],
        ["*norm"],
    ),
    "t5": (
        _of(
            "T5Config",
            "T5ForConditionalGeneration",
            {"d_ff": 2048, "decoder_start_token_id": 0},
            {"d_model": 32, "d_ff": 64, "d_kv": 16, "num_layers": 2, "num_heads": 2}
            | {"vocab_size": 100},
        ),
        ["encoder.block[:1]"],
        ["decoder.block[-1:]"],
        ["*layer_norm"],
    ),
    "vit": (
        _of(
            "ViTConfig",
            "ViTForImageClassification",
            _LABELS,
            {**_SMALL, "image_size": 32, "patch_size": 8},
        ),
        ["vit.embeddings"],
        ["classifier"],
        ["*layernorm*"],
    ),
    "resnet50": (
        _of(
            "ResNetConfig",
            "ResNetForImageClassification",
            _LABELS,
            {**_RESNET_SMALL, "depths": [1, 1, 1, 1]},
        ),
        ["resnet.embedder", "resnet.encoder.stages[:2]"],
        ["resnet.encoder.stages[-1:]", "classifier"],
        ["*normalization"],
    ),
    "resnet101": (
        _of(
            "ResNetConfig",
            "ResNetForImageClassification",
            {**_LABELS, "depths": [3, 4, 23, 3]},
            {**_RESNET_SMALL, "depths": [1, 1, 1, 1]},
        ),
        ["resnet.embedder", "resnet.encoder.stages[:2]"],
        ["resnet.encoder.stages[-1:]", "classifier"],
        ["*normalization"],
    ),
    "convnext": (
        _of(
            "ConvNextConfig",
            "ConvNextForImageClassification",
            _LABELS,
            {"hidden_sizes": [8, 8, 16, 16], "depths": [1, 1, 1, 1]},
        ),
        ["convnext.embeddings", "convnext.encoder.stages[:2]"],
        ["convnext.encoder.stages[-1:]", "classifier"],
        ["*layernorm*"],
    ),
    "mobilenet": (
        _of(
            "MobileNetV2Config",
            "MobileNetV2ForImageClassification",
            _LABELS,
            {"depth_multiplier": 0.25, "image_size": 32},
        ),
        ["mobilenet_v2.conv_stem", "mobilenet_v2.layer[:8]"],
        ["classifier"],
        ["*normalization"],
    ),
}
