"""Rows of peft's public method comparison: one Llama in bf16, nearly everything of it frozen.

How each run was set up: Llama-3.2-3B, 4 rows of up to 768 tokens with padding mask and labels,
AdamW with weight decay, gradients clipped to norm 1, no gradient checkpointing; adapters in fp32
where ``autocast_adapter_dtype`` says so. The settings of adapters are what the table's columns and
an experiment's name say, and for the rest those of the comparison (huggingface/peft,
method_comparison/MetaMathQA, Apache-2.0). The number of trainable parameters is compared with the
table's: it tells whether the adapter is the one that was measured.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
import statistics
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from _accuracy.xmem import LLAMA_3B
from freezekit import estimate_memory
from freezekit._memory.replay import replay

__all__ = [
    "Experiment",
    "begin_training",
    "build",
    "estimate_experiment",
    "fit_length",
    "read_experiment",
]

BATCH = 4
LONGEST = 768
# Lengths tried for the fit.
_STRIDE = 32
# Lengths of batches in order, as shares of the longest: a bucket's last, the next bucket's first
# and second; the cache is emptied before the step of this number.
_LENGTHS = (0.2, 1.0, 0.8)
_EMPTIED = 1
TORCH = "2.13.0"


@dataclasses.dataclass(frozen=True, slots=True)
class Experiment:
    """One measured run; ``measured`` is the peak of reserved bytes."""

    name: str
    peft_type: str
    rank: int | None
    targets: tuple[str, ...]
    optimizer: str
    fp32_adapters: bool
    trainable: int
    measured: int


def read_experiment(record: Mapping[str, str]) -> Experiment:
    """A row of the table, by its column names."""
    return Experiment(
        name=record["experiment"],
        peft_type=record["peft_type"],
        rank=int(record["r"]) if record["r"] else None,
        targets=tuple(record["target_modules"].split()),
        optimizer=record["optimizer"],
        fp32_adapters=record["autocast_adapter_dtype"] == "True",
        trainable=int(record["num_trainable_params"]),
        measured=int(record["peak_reserved_bytes"]),
    )


# -- the model ---------------------------------------------------------------------------------


def build(experiment: Experiment, **llama: Any) -> nn.Module:
    """The model of an experiment; ``llama`` changes its size.

    It has no data, unless the adapter is made from the values of weights (decompositions, masks):
    then the weights that it targets get random ones.

    Raises:
        ValueError: the installed peft has no adapter of this type; or it cannot be built.
    """
    import peft

    if experiment.peft_type == "FULL":
        return _llama(llama).train()
    config_class = _config_class(experiment.peft_type)
    try:
        try:
            adapted = _adapt(experiment, config_class, _llama(llama))
        except (NotImplementedError, RuntimeError):
            adapted = _adapt(experiment, config_class, _with_data(_llama(llama), experiment))
    except (ImportError, NotImplementedError, RuntimeError, TypeError, ValueError) as error:
        raise ValueError(
            f"peft {peft.__version__} does not build {experiment.peft_type} for this model: "
            f"{type(error).__name__}: {error}"
        ) from error
    if experiment.optimizer == "lora-fa":
        # peft's optimizer of this name freezes the first factor.
        for name, parameter in adapted.named_parameters():
            if "lora_A" in name:
                parameter.requires_grad = False
    return adapted


def _llama(options: Mapping[str, Any]) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    with torch.device("meta"):
        model: nn.Module = LlamaForCausalLM(LlamaConfig(**{**LLAMA_3B, **options}))
    return model.to(torch.bfloat16)


def _with_data(model: nn.Module, experiment: Experiment) -> nn.Module:
    """The model on the CPU: targeted weights random, others as memory happens to be."""
    model = model.to_empty(device="cpu")
    model.tie_weights()  # type: ignore[operator]  # to_empty made two of the head's and the input's
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and name.rpartition(".")[2] in experiment.targets:
            nn.init.normal_(module.weight, std=0.02)
    return model


def _adapt(experiment: Experiment, config_class: Any, model: nn.Module) -> nn.Module:
    import peft

    adapted: nn.Module = peft.get_peft_model(
        model,
        config_class(**_options(experiment, model, config_class)),
        autocast_adapter_dtype=experiment.fp32_adapters,
    )
    return adapted.train()


def _config_class(peft_type: str) -> Any:
    import peft
    from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING

    known = {kind.value: cls for kind, cls in PEFT_TYPE_TO_CONFIG_MAPPING.items()}
    if peft_type not in known:
        near = difflib.get_close_matches(peft_type, known, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"peft {peft.__version__} has no adapter of type {peft_type!r}{hint}")
    return known[peft_type]


def _options(experiment: Experiment, model: nn.Module, config_class: Any) -> dict[str, Any]:
    """What the table, the comparison's settings and the name say, as far as the class takes it."""
    fields = {field.name for field in dataclasses.fields(config_class)}
    options: dict[str, Any] = {"task_type": "CAUSAL_LM"}
    if experiment.rank is not None:
        options["r"] = experiment.rank
    if experiment.targets:
        options["target_modules"] = list(experiment.targets)
    options |= _SETTINGS.get(experiment.peft_type, dict)()
    options |= _from_name(experiment)
    if experiment.peft_type == "OSF":
        options["rank_pattern"] = _osf_ranks(experiment, model)
    if experiment.peft_type == "IA3":
        options["feedforward_modules"] = [t for t in experiment.targets if "down" in t]
    if experiment.peft_type == "ADAPTION_PROMPT":
        options.pop("target_modules", None)
        config: Any = model.config
        options["adapter_layers"] = config.num_hidden_layers
    return {key: value for key, value in options.items() if key in fields}


# What the comparison sets beside rank and targets, where it matters for memory.
_SETTINGS: dict[str, Any] = {
    "ADALORA": lambda: {"init_r": 64, "target_r": 32, "total_step": 5000, "tinit": 200},
    "ADAMSS": lambda: {"num_subspaces": 32, "subspace_rank": 1},
    "ADAPTION_PROMPT": lambda: {"adapter_len": 100},
    "C3A": lambda: {"block_size": 64},
    "CARTRIDGE": lambda: {"num_virtual_tokens": 200},
    "CPT": lambda: {"cpt_token_ids": list(range(20)), "cpt_mask": [1] * 20},
    "DEFT": lambda: {"decomposition_method": "relu"},
    "GRALORA": lambda: {"gralora_k": 2},
    "LILY": lambda: {"num_B": 2, "stride_A": 14},
    "MULTITASK_PROMPT_TUNING": lambda: {"num_virtual_tokens": 200, "num_tasks": 2},
    "POLY": lambda: {"n_tasks": 2},
    "PREFIX_TUNING": lambda: {"num_virtual_tokens": 200},
    "PROMPT_TUNING": lambda: {"num_virtual_tokens": 200},
    "P_TUNING": lambda: {"num_virtual_tokens": 20, "encoder_hidden_size": 3072},
    "TRAINABLE_TOKENS": lambda: {"token_indices": [128_000, 128_001]},
    "WAVEFT": lambda: {"n_frequency": 2592},
}
_WORDS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("dora", {"use_dora": True}),
    ("rslora", {"use_rslora": True}),
    ("mica", {"init_lora_weights": "mica"}),
    ("bat", {"init_weights": "bat"}),
    ("mini", {"init_weights": "mini", "mini_r": 64}),
    ("para", {"para": True, "decomposition_method": "qr"}),
    ("weight-tying", {"weight_tying": 1.0}),
    ("MLP", {"encoder_reparameterization_type": "MLP"}),
    ("LSTM", {"encoder_reparameterization_type": "LSTM"}),
)
_NUMBERS: tuple[tuple[str, str], ...] = (
    (r"n_frequency-(\d+)", "n_frequency"),
    (r"sparse(0?\.\d+)", "sparse_rate"),
    (r"depth(\d+)", "depth"),
    (r"factor(\d+)", "decompose_factor"),
    (r"bank(\d+)", "num_vectors"),
    (r"(?:vt|tokens)(\d+)", "num_virtual_tokens"),
    (r"td(\d+)", "theta_d_length"),
)
_BLOCKS = {
    "target_modules_bd_a": ["o_proj", "down_proj"],
    "target_modules_bd_b": ["q_proj", "v_proj", "k_proj", "up_proj", "gate_proj"],
    "nblocks": 2,
}


def _from_name(experiment: Experiment) -> dict[str, Any]:
    """What the words of an experiment's name say."""
    name = experiment.name.rpartition("/")[2]
    options: dict[str, Any] = {}
    for word, meaning in _WORDS:
        if re.search(rf"(?<![A-Za-z]){re.escape(word)}(?![A-Za-z])", name):
            options |= meaning
    for pattern, key in _NUMBERS:
        found = re.search(pattern, name)
        if found:
            options[key] = float(found[1]) if "." in found[1] else int(found[1])
    if "bdlora" in name:
        options["use_bdlora"] = _BLOCKS
    return options


def _osf_ranks(experiment: Experiment, model: nn.Module) -> dict[str, int]:
    """OSF keeps the large singular values: all but the number that the name gives learn."""
    found = re.search(r"rank(\d+)", experiment.name)
    learned = int(found[1]) if found else 128
    ranks: dict[str, int] = {}
    for name, module in model.named_modules():
        last = name.rpartition(".")[2]
        if isinstance(module, nn.Linear) and last in experiment.targets:
            ranks[last] = min(module.weight.shape) - learned
    return ranks


# -- the run -----------------------------------------------------------------------------------


def begin_training(model: nn.Module) -> Optimizer:
    """The optimizer, and what the comparison does between making it and the first step.

    There it takes the loss of the base model alone (for how much is forgotten; huggingface/peft
    #3419), and peft's ``disable_adapter`` leaves all of the active adapter trainable, also what
    was frozen (#3447): LoRA-FA's first factor then gets gradients, and what its backward needs is
    kept, but no optimizer holds it.
    """
    optimizer = torch.optim.AdamW(
        [parameter for parameter in model.parameters() if parameter.requires_grad],
        lr=1e-4,
        weight_decay=0.1,
        foreach=True,
    )
    # The full fine-tune is no peft model.
    disable_adapter: Callable[[], AbstractContextManager[None]] = getattr(
        model, "disable_adapter", nullcontext
    )
    with disable_adapter():
        pass
    return optimizer


def estimate_experiment(
    model: nn.Module, optimizer: Optimizer, experiment: Experiment, length: int
) -> int:
    """Predicted peak of reserved bytes; the longest batch has rows of ``length`` tokens.

    The comparison sorts each 20 batches by length, the longest first, and empties the cache after
    every tenth step: so right before each longest batch.
    """
    ids = torch.empty(BATCH, length, dtype=torch.long, device="meta")
    inputs = {name: torch.empty_like(ids) for name in ("input_ids", "attention_mask", "labels")}
    if experiment.peft_type in ("MULTITASK_PROMPT_TUNING", "POLY"):
        inputs["task_ids"] = torch.empty(BATCH, dtype=torch.long, device="meta")
    estimate = estimate_memory(
        model,
        inputs,
        optimizer=optimizer,
        steps=2,
        clip=1.0,
        device="NVIDIA L40S",
        torch_version=TORCH,
    )
    stream = estimate.stream.repeated(len(_LENGTHS) - 2)
    assert stream is not None  # an adapter that keeps memory from step to step
    return replay(stream.scaled(dict(enumerate(_LENGTHS))), emptied=(_EMPTIED,)).peak_reserved


def fit_length(experiment: Experiment) -> int:
    """The length of the longest rows at which the estimate meets what was measured.

    What a full fine-tune reserves hardly depends on it (weights, gradients and optimizer state are
    most of it, fragments the rest): of all lengths that meet it within 2 %, the middle one.

    Raises:
        ValueError: no length does, within 10 %.
    """
    model = build(experiment)
    optimizer = begin_training(model)
    errors = {
        length: abs(
            estimate_experiment(model, optimizer, experiment, length) / experiment.measured - 1
        )
        for length in range(_STRIDE, LONGEST + 1, _STRIDE)
    }
    least = min(errors.values())
    if least > 0.1:
        raise ValueError(f"{experiment.name}: no length meets it within 10 % (least {least:.1%})")
    return statistics.median_low(
        length for length, error in errors.items() if error <= max(0.02, least)
    )
