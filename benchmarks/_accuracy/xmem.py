"""Rows of the public xMem study (MIT): runs on real GPUs, rebuilt on fake tensors.

How each run was set up: torch 2.6.0; steps in the order zero_grad, forward, backward, optimizer;
four steps; fp32; optimizer defaults with foreach; outputs and loss stay bound. Transformers get
rows of 128 tokens with attention mask and labels (padded to the longest of their batch, which may
be shorter, unless the tokenizing step had padded all), CNNs images of 86 x 86. The allocator had
the card's memory less the CUDA context. What was measured is the device's memory beside that
context, so predicted is what is reserved; libraries took 14 to 54 MiB more (354 on the A100), which
is not added.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, cast

import torch
from torch import nn

from freezekit import MemoryEstimate, estimate_memory

__all__ = [
    "LLAMA_3B",
    "MODELS",
    "Row",
    "build_model",
    "build_row",
    "estimate_built",
    "estimate_row",
    "read_row",
]

Built: TypeAlias = tuple[nn.Module, Any, Callable[[Any], torch.Tensor] | None]

# Their tokenizing step pads each chunk of 1,000 lines to its longest one.
_PADDED = ("Qwen3", "DeepSeek", "pythia")
TOKENS = 128
TORCH = "2.6.0"
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
    memory: int
    device: str
    measured: int
    xmem: int | None
    dnnmem: int | None


def read_row(record: Mapping[str, str]) -> Row:
    """A row of the table, by its column names."""
    return Row(
        run=record["run_id"],
        model=record["model"],
        family=record["family"],
        optimizer=record["optimizer"],
        batch=int(record["batch_size"]),
        zero_grad=record["zero_grad_to_use"] or "0",
        memory=int(record["gpu_total_bytes"]),
        device=_device(record["gpu"]),
        measured=int(record["ground_bytes"]),
        xmem=int(record["xmem_bytes"]) if record["xmem_bytes"] else None,
        dnnmem=int(record["dnnmem_bytes"]) if record["dnnmem_bytes"] else None,
    )


def _lengths_vary(row: Row) -> bool:
    """Whether a batch may well be shorter than the longest one.

    A quarter of the lines reach the limit of 128 tokens. That one of the four batches has none of
    them is as likely as 1 % up to a batch of 20, and next to impossible from 30 on.
    """
    if row.family != "transformer" or any(name in row.model for name in _PADDED):
        return False
    return 4 * 0.75**row.batch >= 0.01


def _device(card: str) -> str:
    names = {"RTX 3060": "NVIDIA GeForce RTX 3060", "RTX 4060": "NVIDIA GeForce RTX 4060"}
    return next((name for key, name in names.items() if key in card), "NVIDIA A100-SXM4-40GB")


def estimate_row(row: Row) -> MemoryEstimate:
    """What is predicted for a run."""
    return estimate_built(row, build_row(row))


def estimate_built(row: Row, built: Built) -> MemoryEstimate:
    """The same, of what :func:`build_row` made."""
    zero_grad = {"0": "start", "1": "before_backward", "2": "end"}[row.zero_grad]
    model, inputs, loss = built
    return estimate_memory(
        model.train(),
        inputs,
        loss=loss,
        optimizer=row.optimizer.lower(),
        steps=4,
        zero_grad=cast(Literal["start", "before_backward", "end"], zero_grad),
        lengths="vary" if _lengths_vary(row) else "fixed",
        device=row.device,
        budget=row.memory,
        torch_version=TORCH,
    )


def build_row(row: Row) -> Built:
    """The model of a run, what goes in, and its loss (``None``: the output's own)."""
    model = build_model(row.model)
    if row.family == "cnn":
        images = torch.empty(row.batch, *IMAGE, device="meta")
        labels = torch.empty(row.batch, dtype=torch.long)
        return model, images, lambda out: nn.functional.cross_entropy(out, labels)
    ids = torch.empty(row.batch, TOKENS, dtype=torch.long, device="meta")
    inputs = {name: torch.empty_like(ids) for name in ("input_ids", "attention_mask", "labels")}
    return model, inputs, None


# -- models ------------------------------------------------------------------------------------


def build_model(name: str) -> nn.Module:
    """A model of the study by its name there, or by the last part of it; without data.

    Raises:
        ValueError: the study has no such model; near names are told.
    """
    found = _ALIASES.get(name.rpartition("/")[2].lower())
    if found is None:
        near = difflib.get_close_matches(name.rpartition("/")[2].lower(), _ALIASES, n=3)
        hint = f"; did you mean {' or '.join(_ALIASES[alias] for alias in near)}?" if near else ""
        raise ValueError(f"the study has no model {name!r}{hint} (known: {', '.join(MODELS)})")
    if found in _TRANSFORMERS:
        with torch.device("meta"):
            return _transformer(found)
    return _cnn(found)


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
    # Not on meta: torchvision's RegNet reads values to find its widths.
    model: nn.Module = getattr(models, _TORCHVISION[name])(weights=None)
    return model


def _transformer(name: str) -> nn.Module:
    import transformers

    kind, options = _TRANSFORMERS[name]
    config_class, model_class = kind
    config = getattr(transformers, config_class)(**options)
    model: nn.Module = getattr(transformers, model_class)(config)
    return model


_TORCHVISION = {
    "VGG16": "vgg16",
    "VGG19": "vgg19",
    "ResNet50": "resnet50",
    "ResNet101": "resnet101",
    "ResNet152": "resnet152",
    "MobileNetV2": "mobilenet_v2",
    # Built with ten classes, from parts; spelled as the study spells them.
    "MobeNetV3Small": "",
    "MobeNetV3Large": "",
    "MnasNet": "",
    "ConvNeXtTiny": "convnext_tiny",
    "ConvNeXtBase": "convnext_base",
    "RegNetX400MF": "regnet_x_400mf",
    "RegNetY400MF": "regnet_y_400mf",
}
LLAMA_3B: dict[str, Any] = {
    "vocab_size": 128_256,
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "num_hidden_layers": 28,
    "num_attention_heads": 24,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "tie_word_embeddings": True,
}
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
    # Norms behind the blocks, and embeddings narrower than the blocks.
    "facebook/opt-350m": (
        ("OPTConfig", "OPTForCausalLM"),
        {
            "hidden_size": 1024,
            "num_hidden_layers": 24,
            "ffn_dim": 4096,
            "num_attention_heads": 16,
            "word_embed_proj_dim": 512,
            "do_layer_norm_before": False,
            "dropout": 0.1,
        },
    ),
    "EleutherAI/pythia-1b": (
        ("GPTNeoXConfig", "GPTNeoXForCausalLM"),
        {
            "vocab_size": 50_304,
            "hidden_size": 2048,
            "num_hidden_layers": 16,
            "num_attention_heads": 8,
            "intermediate_size": 8192,
        },
    ),
    "microsoft/deberta-base": (
        ("DebertaConfig", "DebertaForMaskedLM"),
        {
            "vocab_size": 50_265,
            "type_vocab_size": 0,
            "relative_attention": True,
            "position_biased_input": False,
            "pos_att_type": ["c2p", "p2c"],
            "layer_norm_eps": 1e-7,
        },
    ),
    "Qwen/Qwen3-0.6B": (
        ("Qwen3Config", "Qwen3ForCausalLM"),
        {
            "vocab_size": 151_936,
            "hidden_size": 1024,
            "intermediate_size": 3072,
            "num_hidden_layers": 28,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "tie_word_embeddings": True,
        },
    ),
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
        LLAMA_3B,
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

MODELS = (*_TORCHVISION, *_TRANSFORMERS)
_ALIASES = {name.rpartition("/")[2].lower(): name for name in MODELS}
_ALIASES |= {"mobilenetv3small": "MobeNetV3Small", "mobilenetv3large": "MobeNetV3Large"}
