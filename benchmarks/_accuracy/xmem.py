"""Rows of the public xMem study: runs on real GPUs, rebuilt on fake tensors.

How each run was set up: steps in the order zero_grad, forward, backward, optimizer; four steps;
fp32; optimizer defaults with foreach; outputs and loss stay bound. Transformers get rows of 128
tokens with attention mask and labels, CNNs images of 86 x 86.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from torch import nn

from freezekit._memory.estimate import estimate_memory

__all__ = ["Row", "estimate_row", "read_row"]

TOKENS = 128
IMAGE = (3, 86, 86)


@dataclass(frozen=True, slots=True)
class Row:
    """One measured run; bytes."""

    run: str
    model: str
    family: str
    optimizer: str
    batch: int
    zero_grad: str
    capability: tuple[int, int]
    measured: int
    xmem: int | None
    dnnmem: int | None


def read_row(record: Mapping[str, str]) -> Row:
    """A row of the table, by its column names."""
    # A40-class and older consumer cards share the 8.125 MiB workspace; only Hopper differs.
    return Row(
        run=record["run_id"],
        model=record["model"],
        family=record["family"],
        optimizer=record["optimizer"],
        batch=int(record["batch_size"]),
        zero_grad=record["zero_grad_to_use"] or "0",
        capability=(8, 0),
        measured=int(record["ground_bytes"]),
        xmem=int(record["xmem_bytes"]) if record["xmem_bytes"] else None,
        dnnmem=int(record["dnnmem_bytes"]) if record["dnnmem_bytes"] else None,
    )


def estimate_row(row: Row) -> int:
    """Predicted peak reserved bytes of a run."""
    zero_grad = {"0": "start", "1": "before_backward", "2": "end"}[row.zero_grad]
    model, inputs, loss = _build(row)
    estimate = estimate_memory(
        model.train(),
        inputs,
        loss=loss,
        optimizer=row.optimizer.lower(),
        steps=4,
        zero_grad=cast(Literal["start", "before_backward", "end"], zero_grad),
        capability=row.capability,
    )
    return estimate.peak_reserved


def _build(row: Row) -> tuple[nn.Module, Any, Callable[[Any], torch.Tensor] | None]:
    if row.family == "cnn":
        images = torch.empty(row.batch, *IMAGE, device="meta")
        labels = torch.empty(row.batch, dtype=torch.long)
        return _cnn(row.model), images, lambda out: nn.functional.cross_entropy(out, labels)
    ids = torch.empty(row.batch, TOKENS, dtype=torch.long, device="meta")
    inputs = {name: torch.empty_like(ids) for name in ("input_ids", "attention_mask", "labels")}
    with torch.device("meta"):
        return _transformer(row.model), inputs, None


def _cnn(name: str) -> nn.Module:
    from torchvision import models
    from torchvision.models import mobilenetv3

    def mobilenet_v3(kind: str, channels: int) -> nn.Module:
        settings, _ = mobilenetv3._mobilenet_v3_conf(f"mobilenet_v3_{kind}")  # noqa: SLF001
        model: nn.Module = mobilenetv3.MobileNetV3(settings, channels, num_classes=10)
        return model

    if name == "MobeNetV3Small":
        return mobilenet_v3("small", 1024)
    if name == "MobeNetV3Large":
        return mobilenet_v3("large", 1280)
    if name == "MnasNet":
        mnasnet: nn.Module = models.MNASNet(1.0, num_classes=10)
        return mnasnet
    names = {
        "ConvNeXtTiny": "convnext_tiny",
        "ConvNeXtBase": "convnext_base",
        "MobileNetV2": "mobilenet_v2",
        "RegNetX400MF": "regnet_x_400mf",
        "RegNetY400MF": "regnet_y_400mf",
    }
    model: nn.Module = getattr(models, names.get(name, name.lower()))(weights=None)
    return model


def _transformer(name: str) -> nn.Module:
    import transformers

    kind, options = _TRANSFORMERS[name]
    config_class, model_class = kind
    config = getattr(transformers, config_class)(**options)
    model: nn.Module = getattr(transformers, model_class)(config)
    return model


_GPT2 = ("GPT2Config", "GPT2LMHeadModel")
_TRANSFORMERS: dict[str, tuple[tuple[str, str], dict[str, Any]]] = {
    "openai-community/gpt2": (_GPT2, {}),
    "distilbert/distilgpt2": (_GPT2, {"n_layer": 6}),
    "cerebras/Cerebras-GPT-111M": (
        _GPT2,
        {
            "n_positions": 2048,
            "n_layer": 10,
            "n_inner": 3072,
            "activation_function": "gelu",
            "resid_pdrop": 0.0,
            "embd_pdrop": 0.0,
            "attn_pdrop": 0.0,
        },
    ),
    "EleutherAI/gpt-neo-125M": (
        ("GPTNeoConfig", "GPTNeoForCausalLM"),
        {
            "hidden_size": 768,
            "num_layers": 12,
            "attention_types": [[["global", "local"], 6]],
            "num_heads": 12,
            "resid_dropout": 0.0,
            "embed_dropout": 0.0,
            "attention_dropout": 0.0,
        },
    ),
    "facebook/opt-125m": (("OPTConfig", "OPTForCausalLM"), {"dropout": 0.1}),
    "T5-small": (
        ("T5Config", "T5ForConditionalGeneration"),
        {"d_ff": 2048, "decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 1},
    ),
    "google-t5/t5-base": (
        ("T5Config", "T5ForConditionalGeneration"),
        {
            "d_model": 768,
            "d_ff": 3072,
            "num_layers": 12,
            "num_heads": 12,
            "decoder_start_token_id": 0,
        },
    ),
    "meta-llama/Llama-3.2-3B-Instruct": (
        ("LlamaConfig", "LlamaForCausalLM"),
        {
            "vocab_size": 128_256,
            "hidden_size": 3072,
            "intermediate_size": 8192,
            "num_hidden_layers": 28,
            "num_attention_heads": 24,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "tie_word_embeddings": True,
        },
    ),
    "Qwen/Qwen3-4B": (
        ("Qwen3Config", "Qwen3ForCausalLM"),
        {
            "vocab_size": 151_936,
            "hidden_size": 2560,
            "intermediate_size": 9728,
            "num_hidden_layers": 36,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "tie_word_embeddings": True,
        },
    ),
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B": (
        ("Qwen2Config", "Qwen2ForCausalLM"),
        {
            "vocab_size": 151_936,
            "hidden_size": 1536,
            "intermediate_size": 8960,
            "num_hidden_layers": 28,
            "num_attention_heads": 12,
            "num_key_value_heads": 2,
            "tie_word_embeddings": False,
        },
    ),
    "google/gemma-2-2b-it": (
        ("Gemma2Config", "Gemma2ForCausalLM"),
        {
            "vocab_size": 256_000,
            "hidden_size": 2304,
            "intermediate_size": 9216,
            "num_hidden_layers": 26,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "query_pre_attn_scalar": 256,
            "sliding_window": 4096,
            "tie_word_embeddings": True,
        },
    ),
}
