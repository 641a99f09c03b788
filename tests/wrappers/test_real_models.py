"""Architectures of transformers, tiny: parts frozen, really trained, audited, compared in bits."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import transformers
from torch import nn

import freezekit
from freezekit._audit import Finding
from wrappers.wrappers_support import bits, flags, moved

IDS = torch.tensor([[1, 2, 3, 4, 5], [5, 4, 3, 2, 1]])
CLASSES = torch.tensor([0, 1])

# Sizes that most configurations have.
TEXT = {"vocab_size": 32, "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2}
WIDE = {**TEXT, "intermediate_size": 16}
DECODER = {**WIDE, "num_key_value_heads": 1, "bos_token_id": 1, "eos_token_id": 2}
SPEECH = {
    **WIDE,
    "conv_dim": (8, 8),
    "conv_stride": (4, 4),
    "conv_kernel": (8, 8),
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
    "mask_time_prob": 0.0,
}
RESNET = {"embedding_size": 4, "hidden_sizes": [4, 8], "depths": [1, 1], "layer_type": "basic"}


@dataclass(frozen=True)
class Architecture:
    """How to make one, what to feed it, what of it to freeze, and what is held in all of it."""

    model: str
    config: str
    options: Mapping[str, Any]
    batch: Callable[[], Mapping[str, torch.Tensor]]
    frozen: str
    held: tuple[str, ...] = ()

    def make(self) -> nn.Module:
        torch.manual_seed(0)
        config = getattr(transformers, self.config)(**self.options)
        model: nn.Module = getattr(transformers, self.model)(config)
        return model


def text() -> Mapping[str, torch.Tensor]:
    return {"input_ids": IDS, "labels": IDS}


def image() -> Mapping[str, torch.Tensor]:
    return {"pixel_values": torch.randn(2, 3, 16, 16), "labels": CLASSES}


ARCHITECTURES = {
    "BERT": Architecture(
        "BertForSequenceClassification",
        "BertConfig",
        WIDE,
        lambda: {"input_ids": IDS, "labels": CLASSES},
        "bert",
    ),
    "GPT-2, tied": Architecture(
        "GPT2LMHeadModel",
        "GPT2Config",
        {
            "vocab_size": 32,
            "n_embd": 8,
            "n_layer": 2,
            "n_head": 2,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
        text,
        "transformer.h[0]",
    ),
    "T5, tied": Architecture(
        "T5ForConditionalGeneration",
        "T5Config",
        {
            "vocab_size": 32,
            "d_model": 8,
            "d_kv": 4,
            "d_ff": 16,
            "num_layers": 2,
            "num_heads": 2,
            "decoder_start_token_id": 0,
        },
        text,
        "encoder.block",
    ),
    "BART, tied": Architecture(
        "BartForConditionalGeneration",
        "BartConfig",
        {
            "vocab_size": 32,
            "d_model": 8,
            "encoder_layers": 1,
            "decoder_layers": 1,
            "encoder_attention_heads": 2,
            "decoder_attention_heads": 2,
            "encoder_ffn_dim": 8,
            "decoder_ffn_dim": 8,
            "max_position_embeddings": 16,
        },
        text,
        "model.encoder.layers",
    ),
    "ViT": Architecture(
        "ViTForImageClassification",
        "ViTConfig",
        {
            "hidden_size": 8,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "intermediate_size": 16,
            "image_size": 16,
            "patch_size": 8,
        },
        image,
        "vit",
    ),
    "Swin": Architecture(
        "SwinForImageClassification",
        "SwinConfig",
        {
            "image_size": 16,
            "patch_size": 2,
            "embed_dim": 8,
            "depths": [1, 1],
            "num_heads": [2, 2],
            "window_size": 2,
        },
        image,
        "swin",
    ),
    "ConvNeXt": Architecture(
        "ConvNextForImageClassification",
        "ConvNextConfig",
        {"hidden_sizes": [4, 8], "depths": [1, 1], "num_stages": 2, "drop_path_rate": 0.1},
        image,
        "convnext",
    ),
    "ResNet": Architecture(
        "ResNetForImageClassification", "ResNetConfig", RESNET, image, "resnet", ("BatchNorm2d",)
    ),
    "CLIP": Architecture(
        "CLIPModel",
        "CLIPConfig",
        {
            "text_config": {**WIDE, "max_position_embeddings": 8, "eos_token_id": 5},
            "vision_config": {
                "hidden_size": 8,
                "intermediate_size": 16,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "image_size": 16,
                "patch_size": 8,
            },
            "projection_dim": 4,
        },
        lambda: {
            "input_ids": IDS,
            "pixel_values": torch.randn(2, 3, 16, 16),
            "return_loss": torch.tensor(True),
        },
        "vision_model",
    ),
    "Llama": Architecture("LlamaForCausalLM", "LlamaConfig", DECODER, text, "model.layers[0]"),
    "Mixtral": Architecture(
        "MixtralForCausalLM",
        "MixtralConfig",
        {**DECODER, "num_local_experts": 4, "router_jitter_noise": 0.1},
        text,
        "model.layers[0]",
    ),
    "DeepSeek-V3": Architecture(
        "DeepseekV3ForCausalLM",
        "DeepseekV3Config",
        {
            **DECODER,
            "num_key_value_heads": 2,
            "moe_intermediate_size": 8,
            "n_shared_experts": 1,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_group": 2,
            "topk_group": 1,
            "kv_lora_rank": 8,
            "q_lora_rank": 8,
            "qk_rope_head_dim": 4,
            "qk_nope_head_dim": 4,
            "v_head_dim": 4,
            "first_k_dense_replace": 1,
        },
        text,
        "model.layers[-1]",
        ("DeepseekV3TopkRouter",),
    ),
    "Mamba": Architecture(
        "MambaForCausalLM",
        "MambaConfig",
        {"vocab_size": 32, "hidden_size": 8, "state_size": 4, "num_hidden_layers": 2},
        text,
        "backbone.layers[0]",
    ),
    "Whisper": Architecture(
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        {
            "vocab_size": 32,
            "d_model": 8,
            "encoder_layers": 1,
            "decoder_layers": 1,
            "encoder_attention_heads": 2,
            "decoder_attention_heads": 2,
            "encoder_ffn_dim": 16,
            "decoder_ffn_dim": 16,
            "num_mel_bins": 4,
            "max_source_positions": 10,
            "max_target_positions": 10,
            "decoder_start_token_id": 0,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
        lambda: {"input_features": torch.randn(2, 4, 20), "labels": IDS},
        "model.encoder",
    ),
    "wav2vec2, weight norm": Architecture(
        "Wav2Vec2ForCTC",
        "Wav2Vec2Config",
        SPEECH,
        lambda: {"input_values": torch.randn(2, 400), "labels": torch.tensor([[1, 2], [3, 4]])},
        "wav2vec2",
    ),
    "wav2vec2 conformer": Architecture(
        "Wav2Vec2ConformerForCTC",
        "Wav2Vec2ConformerConfig",
        {**SPEECH, "conv_depthwise_kernel_size": 3},
        lambda: {"input_values": torch.randn(2, 400), "labels": torch.tensor([[1, 2], [3, 4]])},
        "wav2vec2_conformer",
        ("BatchNorm1d",),
    ),
    "DETR": Architecture(
        "DetrModel",
        "DetrConfig",
        {
            "backbone_config": transformers.ResNetConfig(**RESNET, out_features=["stage2"]),
            "d_model": 8,
            "encoder_layers": 1,
            "decoder_layers": 1,
            "encoder_attention_heads": 2,
            "decoder_attention_heads": 2,
            "encoder_ffn_dim": 8,
            "decoder_ffn_dim": 8,
            "num_queries": 4,
        },
        lambda: {"pixel_values": torch.randn(2, 3, 32, 32)},
        "encoder",
        ("DetrFrozenBatchNorm2d",),
    ),
}

every_architecture = pytest.mark.parametrize(
    "architecture", ARCHITECTURES.values(), ids=ARCHITECTURES
)


@pytest.fixture(autouse=True)
def quiet() -> None:
    """Silence: transformers tells at length which kernels are not installed."""
    transformers.logging.set_verbosity_error()


def step(model: nn.Module, architecture: Architecture) -> None:
    """One real training step, with an optimizer that moves all that has a gradient."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.1)
    output = model.train()(**architecture.batch())
    loss = getattr(output, "loss", None)
    if loss is None:
        loss = output.last_hidden_state.pow(2).mean()
    loss.backward()
    optimizer.step()


def findings(model: nn.Module, code: str) -> list[Finding]:
    return [finding for finding in freezekit.audit(model).findings if finding.code == code]


# -- freezing parts -----------------------------------------------------------------------------


@every_architecture
def test_frozen_part_keeps_its_bits(architecture: Architecture) -> None:
    """A step moves no bit of the frozen part, parameters and buffers, and moves the rest."""
    model = architecture.make()
    report = freezekit.freeze(model, architecture.frozen)
    before = bits(model)
    step(model, architecture)
    changed = moved(before, model)
    trainable = {name for name, flag in flags(model).items() if flag}
    assert report.changed
    assert changed & trainable
    assert changed <= trainable


@every_architecture
def test_figures_are_those_of_the_model(architecture: Architecture) -> None:
    """Report and audit count what a plain sum over the model's own tensors counts."""
    model = architecture.make()
    report = freezekit.freeze(model, architecture.frozen)
    audit = freezekit.audit(model)
    parameters = list(model.parameters())
    trainable = [p for p in parameters if p.requires_grad]
    assert audit.trainable == report.trainable == sum(p.numel() for p in trainable)
    assert audit.total == report.total == sum(p.numel() for p in parameters)
    assert audit.parameter_bytes == sum(p.nbytes for p in parameters)
    assert audit.trainable_bytes == sum(p.nbytes for p in trainable)
    assert audit.buffer_bytes == sum(b.nbytes for b in model.buffers())
    assert (audit.tensors, audit.trainable_tensors) == (len(parameters), len(trainable))
    outermost = [row for row in audit.rows if row.depth == 0]
    assert sum(row.numel for row in outermost) == audit.total
    assert sum(row.trainable for row in outermost) == audit.trainable
    assert sum(row.nbytes for row in outermost) == audit.parameter_bytes


@every_architecture
def test_what_is_held(architecture: Architecture) -> None:
    """Of a wholly frozen model, norms with statistics are held, and nothing that has none."""
    model = architecture.make()
    held = freezekit.freeze(model).held
    assert {type(model.get_submodule(name)).__name__ for name in held} == set(architecture.held)
    freezekit.unfreeze(model)
    assert all(module.training for module in model.train().modules())


@every_architecture
def test_no_false_alarm(architecture: Architecture) -> None:
    """A model as it comes has no finding that says that something moves which does not."""
    model = architecture.make().train()
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    frozen = copy.deepcopy(model).requires_grad_(requires_grad=False)
    for candidate in (model, frozen):
        alarms = findings(candidate, "FK201")
        with torch.no_grad():
            candidate(**architecture.batch())
        still = {
            name.rpartition(".")[0]
            for name, buffer in candidate.named_buffers()
            if torch.equal(buffer, buffers[name])
        }
        assert {name for finding in alarms for name in finding.fqns} & still == set()


@every_architecture
def test_copied_by_its_state(architecture: Architecture) -> None:
    """The freeze of one model makes another one of its kind just as frozen."""
    model, other = architecture.make(), architecture.make()
    freezekit.freeze(model, architecture.frozen)
    freezekit.load_freeze_state(other, freezekit.freeze_state(model))
    assert flags(other) == flags(model)
    assert freezekit.freeze_state(other) == freezekit.freeze_state(model)


# -- what is particular to one ------------------------------------------------------------------


def test_tied_embeddings() -> None:
    """The tied head of GPT-2 is frozen with its embedding, and counted once."""
    model = ARCHITECTURES["GPT-2, tied"].make()
    with pytest.warns(freezekit.errors.PartialTieWarning, match="lm_head.weight is the same"):
        report = freezekit.freeze(model, "transformer.wte")
    assert flags(model)["lm_head.weight"] is False
    assert report.frozen == 32 * 8
    assert freezekit.audit(model).tied == (("transformer.wte.weight", "lm_head.weight"),)


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated:FutureWarning")
def test_checkpointed_layers_stay_so() -> None:
    """Layers of Gemma 4, frozen, go on recomputing activations while a gradient passes them.

    Each has a saved scale among its buffers, which nothing moves; its training mode decides
    whether activations are kept or computed again.
    """
    config = transformers.Gemma4TextConfig(
        **{**DECODER, "hidden_size": 16},
        head_dim=8,
        global_head_dim=8,
        hidden_size_per_layer_input=0,
        vocab_size_per_layer_input=32,
        num_kv_shared_layers=0,
        layer_types=["sliding_attention", "full_attention"],
    )
    model = transformers.Gemma4ForCausalLM(config)
    model.gradient_checkpointing_enable()

    def saved_bytes() -> int:
        saved = 0

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            nonlocal saved
            saved += tensor.nbytes
            return tensor

        embeddings = torch.randn(2, 5, 16, requires_grad=True)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            model.train()(inputs_embeds=embeddings)
        return saved

    model.requires_grad_(requires_grad=False)
    by_hand = saved_bytes()
    freezekit.freeze(model)
    assert saved_bytes() == by_hand


def test_mend_for_the_model_itself() -> None:
    """A finding about the whole model has a mend that can be carried out as it is written."""
    model = ARCHITECTURES["BART, tied"].make()
    model.requires_grad_(requires_grad=False)
    for finding in freezekit.audit(model).findings:
        assert 'freeze(model, "")' not in finding.mend
