"""Small models of every architecture that the installed transformers has."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers.models.auto import modeling_auto

__all__ = ["Architecture", "architectures", "make_small"]

IDS = (2, 32)
MOST_PARAMETERS = 12_000_000
MOST_LAYERS = 16

# Small values for what configurations call the same things by.
_SIZES: dict[str, Any] = {
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), 2),
    **dict.fromkeys(("encoder_layers", "decoder_layers"), 2),
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "embed_dim"), 64),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "d_ff"), 96),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 96),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("kv_lora_rank", "q_lora_rank", "v_head_dim", "head_dim"), 16),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim"), 8),
    **dict.fromkeys(("max_position_embeddings", "n_positions"), 128),
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "vocab_size": 120,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "decoder_start_token_id": 1,
    "eos_token_id": 2,
    "image_size": 64,
    "patch_size": 16,
    "depths": [1, 1, 1, 1],
}
# Sizes that some configurations do not take together with the others.
_WITHOUT = ((), ("head_dim",), ("depths", "embed_dim", "hidden_size"), ("num_hidden_layers",))
_TASKS = ("causal_lm", "masked_lm", "seq_to_seq_causal_lm")
_IMAGE_TASKS = ("image_classification", "semantic_segmentation", "object_detection")


@dataclass(frozen=True, slots=True)
class Architecture:
    """A configuration's class, and the class of its model for a task."""

    task: str
    config: type[Any]
    model: Any

    @property
    def name(self) -> str:
        """The model's class."""
        return str(self.model.__name__)


def architectures() -> Iterator[Architecture]:
    """Models of text and of images, by task."""
    for task in (*_TASKS, *_IMAGE_TASKS):
        mapping = getattr(modeling_auto, f"MODEL_FOR_{task.upper()}_MAPPING")
        for config in list(mapping.keys()):
            try:
                model = mapping[config]
            except (ImportError, ValueError):
                continue
            yield Architecture(task, config, model[0] if isinstance(model, tuple) else model)


def make_small(architecture: Architecture) -> tuple[nn.Module, dict[str, torch.Tensor]] | None:
    """The model with few and small layers, and a batch for it; ``None`` if it has other sizes."""
    for config in _configs(architecture.config):
        # Whatever a model has against these sizes, others may do.
        with suppress(Exception):
            with torch.device("meta"):
                sketch = architecture.model(config)
            deep = getattr(config, "num_hidden_layers", None) or 0
            if deep <= MOST_LAYERS and _count(sketch) <= MOST_PARAMETERS:
                return architecture.model(config).train(), _batch(architecture.task, config)
    return None


def _count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def _configs(config: type[Any]) -> Iterator[Any]:
    with suppress(Exception):
        usual = config()
        sizes = {name: value for name, value in _SIZES.items() if hasattr(usual, name)}
        for without in _WITHOUT:
            with suppress(Exception):
                yield config(**{name: sizes[name] for name in sizes if name not in without})


def _batch(task: str, config: Any) -> dict[str, torch.Tensor]:
    if task in _TASKS:
        ids = torch.randint(3, 100, IDS)
        return {"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids)}
    size = getattr(config, "image_size", None) or 64
    side = size if isinstance(size, int) else size[0]
    return {"pixel_values": torch.randn(2, getattr(config, "num_channels", None) or 3, side, side)}
