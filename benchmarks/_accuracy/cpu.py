"""The fake trace against a real run on the CPU, to the byte."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

import freezekit
from freezekit._memory.answers import DataFunctions
from freezekit._memory.as_real import as_real
from freezekit._memory.recorder import Recorder
from freezekit._memory.shadow import Shadow
from freezekit._memory.steps import Steps, run_steps

__all__ = ["CASES", "Case", "Comparison", "compare"]

IDS = (4, 24)
SMALL: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "vocab_size": 96,
}


def _adamw(parameters: list[nn.Parameter]) -> Optimizer:
    return torch.optim.AdamW(parameters, foreach=True)


def _sgd(parameters: list[nn.Parameter]) -> Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


@dataclass(frozen=True, slots=True)
class Case:
    """A model, what goes in, and how the loop goes."""

    make: Callable[[], tuple[nn.Module, Any]]
    steps: Steps = field(default_factory=lambda: Steps(count=2, optimizer=_adamw))
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Comparison:
    """Bytes of a fake trace and of a real run, at every boundary of a step and at the peak."""

    name: str
    fake_peak: int
    real_peak: int
    boundaries: int
    equal_boundaries: int
    events: int
    fake_seconds: float
    real_seconds: float
    reason: str

    @property
    def equal(self) -> bool:
        """Whether every figure is the same."""
        return self.fake_peak == self.real_peak and self.boundaries == self.equal_boundaries


def compare(name: str, case: Case) -> Comparison:
    """Run the same steps on fake and on real tensors."""
    torch.manual_seed(0)
    model, inputs = case.make()
    start = time.perf_counter()
    shadow = Shadow()
    twin, twin_inputs = shadow.copy(model), shadow.inputs(inputs)
    failed = ""
    recorder = Recorder(known=shadow.known)
    try:
        with as_real(shadow.known), shadow.mode, DataFunctions(recorder.answers):
            fake = run_steps(recorder, twin, twin_inputs, case.steps)
    except RuntimeError as error:
        fake = recorder.close()
        failed = f"no fake run: {error} "
    middle = time.perf_counter()
    real = run_steps(Recorder(), copy.deepcopy(model), copy.deepcopy(inputs), case.steps)
    end = time.perf_counter()
    reason = failed + case.reason if case.reason else ""
    if not (reason or failed) and recorder.answers.assumed:
        reason = "what data decides was assumed"
    expected, found = real.boundaries(), fake.boundaries()
    return Comparison(
        name,
        fake.peak_bytes(),
        real.peak_bytes(),
        len(expected),
        sum(found.get(key) == value for key, value in expected.items()),
        len(fake.events),
        middle - start,
        end - middle,
        reason,
    )


# -- the models --------------------------------------------------------------------------------


def _tokens(vocabulary: int = 96) -> dict[str, torch.Tensor]:
    ids = torch.randint(0, vocabulary, IDS)
    return {"input_ids": ids, "labels": ids}


def _masked(make: Callable[[], tuple[nn.Module, Any]], padded: int) -> Callable[..., Any]:
    """The same with an attention mask, and so many places of the last row padded."""

    def made() -> tuple[nn.Module, Any]:
        model, inputs = make()
        mask = torch.ones_like(inputs["input_ids"])
        mask[-1, mask.shape[1] - padded :] = 0
        return model, {**inputs, "attention_mask": mask}

    return made


def _mlp() -> tuple[nn.Module, Any]:
    layers = [nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 4)]
    return nn.Sequential(*layers), torch.randn(16, 32)


def _cnn() -> tuple[nn.Module, Any]:
    block = [nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2)]
    more = [nn.Conv2d(8, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.AdaptiveAvgPool2d(1)]
    return nn.Sequential(*block, *more, nn.Flatten(), nn.Linear(16, 4)), torch.randn(4, 3, 24, 24)


def _unet() -> tuple[nn.Module, Any]:
    class UNet(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.down = nn.Conv2d(3, 8, 3, stride=2, padding=1)
            self.middle = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.GroupNorm(2, 8))
            self.up = nn.ConvTranspose2d(16, 4, 4, stride=2, padding=1)
            self.out = nn.Conv2d(7, 1, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            low = nn.functional.silu(self.down(x))
            high = self.up(torch.cat([low, self.middle(low)], 1))
            result: torch.Tensor = self.out(torch.cat([x, high], 1))
            return result

    return UNet(), torch.randn(2, 3, 32, 32)


def _bert(attention: str, *frozen: str) -> Callable[[], tuple[nn.Module, Any]]:
    def make() -> tuple[nn.Module, Any]:
        from transformers import BertConfig, BertForMaskedLM

        model = BertForMaskedLM(BertConfig(**SMALL, attn_implementation=attention))
        if frozen:
            freezekit.freeze(model, [name for name in frozen if "decoder" not in name])
        return model, _tokens()

    return make


def _checkpointed() -> tuple[nn.Module, Any]:
    model, inputs = _bert("eager")()
    enable: Any = model.gradient_checkpointing_enable
    enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model, inputs


def _lora() -> tuple[nn.Module, Any]:
    import peft

    model, inputs = _bert("eager")()
    config = peft.LoraConfig(r=4, target_modules=["query", "value"])
    adapted: nn.Module = peft.get_peft_model(model, config)
    return adapted, inputs


def _causal(kind: str, **options: Any) -> Callable[[], tuple[nn.Module, Any]]:
    def make() -> tuple[nn.Module, Any]:
        import transformers

        config = getattr(transformers, f"{kind}Config")(**options)
        suffix = "ForConditionalGeneration" if kind == "T5" else "ForCausalLM"
        suffix = "LMHeadModel" if kind == "GPT2" else suffix
        return getattr(transformers, f"{kind}{suffix}")(config), _tokens()

    return make


def _vit() -> tuple[nn.Module, Any]:
    from transformers import ViTConfig, ViTForImageClassification

    options = {key: value for key, value in SMALL.items() if key != "vocab_size"}
    model = ViTForImageClassification(ViTConfig(**options, image_size=32, patch_size=8))
    return model, torch.randn(2, 3, 32, 32)


def _recurrent(kind: type[nn.GRU | nn.LSTM]) -> Callable[[], tuple[nn.Module, Any]]:
    def make() -> tuple[nn.Module, Any]:
        return kind(8, 16, num_layers=2, batch_first=True, dropout=0.2), torch.randn(3, 7, 8)

    return make


_GROUPED = {**SMALL, "num_key_value_heads": 2}
_EXPERTS = {**_GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2}
_T5 = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "vocab_size": 96}


def _cases() -> Iterator[tuple[str, Case]]:
    yield "MLP", Case(_mlp)
    yield "MLP, SGD with momentum", Case(_mlp, Steps(count=3, optimizer=_sgd))
    yield "CNN with BatchNorm", Case(_cnn)
    yield "U-Net", Case(_unet)
    yield "BERT, eager", Case(_bert("eager"))
    yield "BERT, sdpa", Case(_bert("sdpa"))
    yield "BERT, front frozen", Case(_bert("eager", "bert.embeddings", "bert.encoder.layer[:2]"))
    yield "BERT, middle frozen", Case(_bert("eager", "bert.encoder.layer[1:3]"))
    yield "BERT, back frozen", Case(_bert("eager", "bert.encoder.layer[2:]"))
    yield "BERT, checkpointed", Case(_checkpointed)
    yield "BERT, LoRA", Case(_lora)
    autocast = Steps(count=2, optimizer=_adamw, autocast=torch.bfloat16)
    norm = "real layer_norm keeps fp32 statistics of bf16 rows, the fake one bf16 (4 bytes a row)"
    yield "BERT, autocast bf16", Case(_bert("eager"), autocast, norm)
    clipped = Steps(count=2, optimizer=_adamw, accumulate=2, zero_grad="end")
    yield "BERT, accumulated, cleared at the end", Case(_bert("eager"), clipped)
    yield "BERT, inference", Case(_bert("sdpa"), Steps(count=2, train=False))
    yield "GPT-2", Case(_causal("GPT2", n_embd=32, n_layer=2, n_head=4, vocab_size=96))
    yield "T5", Case(_causal("T5", **_T5, decoder_start_token_id=0))
    yield "Llama, grouped heads", Case(_causal("Llama", **_GROUPED))
    yield "Llama, nothing padded", Case(_masked(_causal("Llama", **_GROUPED), 0))
    yield "Llama, padded", Case(_masked(_causal("Llama", **_GROUPED), 3))
    yield "Mixtral, experts", Case(_causal("Mixtral", **_EXPERTS))
    yield "ViT", Case(_vit)
    yield "GRU", Case(_recurrent(nn.GRU))
    onednn = "oneDNN's LSTM takes a workspace of its own choice, which a fake run does not know"
    yield "LSTM", Case(_recurrent(nn.LSTM), reason=onednn)


CASES: dict[str, Case] = dict(_cases())
