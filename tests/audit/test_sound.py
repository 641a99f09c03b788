"""Sound set-ups, as people write them: audit and audit_step give no error and no warning."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import parametrizations
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint

import freezekit as fk
from audit_support import freeze_by_hand, loud

pytestmark = [
    pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated"),
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of peft's, about its own names
    pytest.mark.filterwarnings("ignore:torch.utils.checkpoint"),
    pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated"),
]


class Setup(NamedTuple):
    """A model as a script leaves it before training, its step and its optimizers."""

    model: nn.Module
    step: Callable[[], object]
    optimizers: list[Optimizer]
    expect: Any = None


def adamw(model: nn.Module, lr: float = 1e-2) -> Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=lr)


def supervised(
    model: nn.Module, forward: Callable[[], torch.Tensor], optimizer: Optimizer | None = None
) -> Setup:
    """Forward, backward, optimizer step, zero_grad: the usual loop's body."""
    optimizer = optimizer or adamw(model)

    def step() -> float:
        optimizer.zero_grad()
        loss = forward().float().pow(2).mean()
        torch.autograd.backward(loss)
        optimizer.step()
        return loss.item()

    return Setup(model, step, [optimizer])


class CNN(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()
        )
        self.head = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.head(self.backbone(x))
        return found


def images() -> torch.Tensor:
    return torch.randn(4, 3, 8, 8)


WORDS = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]])
SMALL = {
    "hidden_size": 8,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "intermediate_size": 16,
    "vocab_size": 11,
}


def bert() -> Any:
    from transformers import BertConfig, BertForSequenceClassification

    model: nn.Module = BertForSequenceClassification(BertConfig(**SMALL, max_position_embeddings=8))
    return model


def classify(model: nn.Module) -> Callable[[], torch.Tensor]:
    return lambda: model(input_ids=WORDS).logits


def gpt2() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=11, n_embd=8, n_layer=4, n_head=2, n_positions=8, bos_token_id=0, eos_token_id=0
    )
    model: nn.Module = GPT2LMHeadModel(config)
    return model


def llama(**options: Any) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    model: nn.Module = LlamaForCausalLM(LlamaConfig(**SMALL, num_key_value_heads=1, **options))
    return model


# -- the set-ups -------------------------------------------------------------------------------


def full_fine_tuning() -> Setup:
    model = CNN().train()
    return supervised(model, lambda: model(images()))


def full_fine_tuning_bert() -> Setup:
    model = bert().train()
    return supervised(model, classify(model))


def linear_probe() -> Setup:
    model = CNN()
    fk.train_only(model, "head")
    model.train()
    return supervised(model, lambda: model(images()))


def linear_probe_by_hand() -> Setup:
    model = CNN()
    freeze_by_hand(model.backbone)
    model.train()
    model.backbone.eval()

    def forward() -> torch.Tensor:
        with torch.no_grad():
            features = model.backbone(images())
        found: torch.Tensor = model.head(features)
        return found

    return supervised(model, forward)


def batch_norm_held() -> Setup:
    model = CNN()
    fk.freeze(model, "type:BatchNorm2d")
    model.train()
    return supervised(model, lambda: model(images()))


def gradual_unfreezing() -> Setup:
    model = bert()
    fk.freeze(model, ["bert.embeddings", "bert.encoder.layer[:2]"])
    model.train()
    return supervised(model, classify(model))


def gradual_unfreezing_with_optimizer() -> Setup:
    model = bert()
    fk.train_only(model, ["classifier", "bert.pooler"])
    optimizer = adamw(model)
    model.train()
    fk.unfreeze(model, "bert.encoder.layer[-1:]", optimizer=optimizer, lr=1e-4)
    return supervised(model, classify(model), optimizer)


def biases_only() -> Setup:
    model = bert()
    fk.train_only(model, ["*.bias", "classifier"])
    model.train()
    return supervised(model, classify(model))


def norms_only() -> Setup:
    model = bert()
    fk.train_only(model, ["*LayerNorm*", "classifier"])
    model.train()
    return supervised(model, classify(model))


def middle_layers() -> Setup:
    model = bert()
    fk.train_only(model, ["bert.encoder.layer[1:3]", "classifier"])
    model.train()
    return supervised(model, classify(model))


def every_second_layer() -> Setup:
    model = bert()
    fk.train_only(model, ["bert.encoder.layer[::2]", "classifier"])
    model.train()
    return supervised(model, classify(model))


def lora() -> Setup:
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(
        llama(), LoraConfig(target_modules=["q_proj", "v_proj"], r=2, lora_dropout=0.1)
    )
    model.train()
    return supervised(model, lambda: model(input_ids=WORDS).logits)


def lora_on_the_last_layers() -> Setup:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(target_modules=["q_proj", "v_proj"], r=2, layers_to_transform=[2, 3])
    model = get_peft_model(llama(), config)
    model.train()
    return supervised(model, lambda: model(input_ids=WORDS).logits)


def lora_with_a_head() -> Setup:
    from peft import LoraConfig, TaskType, get_peft_model

    config = LoraConfig(task_type=TaskType.SEQ_CLS, target_modules=["query", "value"], r=2)
    model = get_peft_model(bert(), config)
    model.train()
    return supervised(model, lambda: model(input_ids=WORDS).logits)


class HandMadeLora(nn.Module):
    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.lora_A = nn.Parameter(torch.randn(2, layer.in_features))
        self.lora_B = nn.Parameter(torch.zeros(layer.out_features, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.layer(x) + x @ self.lora_A.T @ self.lora_B.T
        return found


def hand_made_lora() -> Setup:
    layers = [HandMadeLora(nn.Linear(4, 4)) for _ in range(4)]
    model = nn.Sequential(*layers, nn.Linear(4, 2))
    return supervised(model, lambda: model(torch.randn(3, 4)))


def prefix_tuning() -> Setup:
    from peft import PrefixTuningConfig, TaskType, get_peft_model

    config = PrefixTuningConfig(task_type=TaskType.CAUSAL_LM, num_virtual_tokens=2)
    model = get_peft_model(gpt2(), config)
    model.train()
    return supervised(model, lambda: model(input_ids=WORDS).logits)


class VisualPrompts(nn.Module):
    """Learned prompts before a frozen stack, owned by the model itself."""

    def __init__(self) -> None:
        super().__init__()
        self.prompt_tokens = nn.Parameter(torch.randn(1, 2, 8))
        self.blocks = nn.Sequential(
            *(nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True) for _ in range(3))
        )
        freeze_by_hand(self.blocks)
        self.head = nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        prompts = self.prompt_tokens.expand(len(x), -1, -1)
        found: torch.Tensor = self.head(self.blocks(torch.cat((prompts, x), 1)).mean(1))
        return found


def visual_prompts() -> Setup:
    model = VisualPrompts()
    return supervised(model, lambda: model(torch.randn(3, 4, 8)))


def tied_gpt2() -> Setup:
    model = gpt2().train()
    return supervised(model, lambda: model(input_ids=WORDS).logits)


def tied_gpt2_lower_half_frozen() -> Setup:
    model = gpt2()
    fk.freeze(model, ["transformer.wte", "lm_head", "transformer.wpe", "transformer.h[:2]"])
    model.train()
    return supervised(model, lambda: model(input_ids=WORDS).logits)


def t5() -> Setup:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=11,
        d_model=8,
        d_kv=4,
        d_ff=16,
        num_layers=3,
        num_heads=2,
        decoder_start_token_id=0,
    )
    model = T5ForConditionalGeneration(config).train()
    return supervised(model, lambda: model(input_ids=WORDS, labels=WORDS).logits)


def t5_frozen_encoder() -> Setup:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=11,
        d_model=8,
        d_kv=4,
        d_ff=16,
        num_layers=3,
        num_heads=2,
        decoder_start_token_id=0,
    )
    model = T5ForConditionalGeneration(config).train()
    fk.freeze(model, "encoder.block")
    model.encoder.block.eval()
    return supervised(model, lambda: model(input_ids=WORDS, labels=WORDS).logits)


def vit() -> Any:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=8,
        num_hidden_layers=3,
        num_attention_heads=2,
        intermediate_size=16,
        image_size=8,
        patch_size=4,
    )
    model: nn.Module = ViTForImageClassification(config)
    return model


def vit_probe() -> Setup:
    model = vit()
    fk.train_only(model, "classifier")
    model.train()
    return supervised(model, lambda: model(pixel_values=images()).logits)


def vit_embeddings_frozen() -> Setup:
    model = vit()
    fk.freeze(model, "vit.embeddings")
    model.train()
    return supervised(model, lambda: model(pixel_values=images()).logits)


def gan() -> Setup:
    """One network learns while the other one's flags are off, in turn."""
    generator = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 4))
    discriminator = nn.Sequential(
        parametrizations.spectral_norm(nn.Linear(4, 8)), nn.ReLU(), nn.Linear(8, 1)
    )
    model = nn.ModuleDict({"generator": generator, "discriminator": discriminator})
    optimizers = [adamw(generator), adamw(discriminator)]

    def step() -> None:
        optimizers[0].zero_grad()
        discriminator.requires_grad_(False)
        (-discriminator(generator(torch.randn(4, 2)))).mean().backward()
        optimizers[0].step()
        discriminator.requires_grad_(True)
        optimizers[1].zero_grad()
        fake = generator(torch.randn(4, 2)).detach()
        (discriminator(fake) - discriminator(torch.randn(4, 4))).mean().backward()
        optimizers[1].step()

    return Setup(model, step, optimizers)


def ema_teacher() -> Setup:
    student = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    teacher = copy.deepcopy(student).requires_grad_(False).eval()
    model = nn.ModuleDict({"student": student, "teacher": teacher})
    optimizer = adamw(student)

    def step() -> None:
        optimizer.zero_grad()
        x = torch.randn(6, 3)
        with torch.no_grad():
            target = teacher(x)
        (student(x) - target).pow(2).mean().backward()
        optimizer.step()
        with torch.no_grad():
            for old, new in zip(teacher.parameters(), student.parameters(), strict=True):
                old.lerp_(new, 0.1)
            for kept, now in zip(teacher.buffers(), student.buffers(), strict=True):
                kept.copy_(now)

    return Setup(model, step, [optimizer])


def averaged_model() -> Setup:
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    averaged = AveragedModel(model)
    optimizer = adamw(model)

    def step() -> None:
        optimizer.zero_grad()
        model(torch.randn(4, 3)).pow(2).mean().backward()
        optimizer.step()
        averaged.update_parameters(model)

    return Setup(model, step, [optimizer])


def distillation() -> Setup:
    teacher = CNN().requires_grad_(False).eval()
    student = nn.Sequential(nn.Flatten(), nn.Linear(192, 2))
    model = nn.ModuleDict({"teacher": teacher, "student": student})

    def forward() -> torch.Tensor:
        x = images()
        with torch.no_grad():
            target = teacher(x)
        found: torch.Tensor = student(x) - target
        return found

    return supervised(model, forward)


def ddp() -> Setup:
    model = CNN()
    fk.freeze(model, "backbone")
    model.train()
    wrapped = nn.parallel.DistributedDataParallel(model)
    return supervised(wrapped, lambda: wrapped(images()))


def fully_sharded() -> Setup:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    mesh = init_device_mesh("cpu", (1,))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return supervised(model, lambda: model(torch.randn(4, 3)))


def compiled() -> Setup:
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    freeze_by_hand(model[0])
    wrapped: Any = torch.compile(model, backend="aot_eager")
    wrapped(torch.randn(4, 3))
    return supervised(wrapped, lambda: wrapped(torch.randn(4, 3)))


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(3, 4).requires_grad_(False)
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.head = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.stem(x)
        for block in self.blocks:
            hidden = checkpoint(block, hidden, use_reentrant=False)
        found: torch.Tensor = self.head(hidden)
        return found


def checkpointed() -> Setup:
    model = Checkpointed()
    return supervised(model, lambda: model(torch.randn(2, 3)))


def checkpointed_transformer() -> Setup:
    model = llama()
    fk.freeze(model, "model.embed_tokens")
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    return supervised(model, lambda: model(input_ids=WORDS, use_cache=False).logits)


def checkpointed_reentrant() -> Setup:
    model = llama()
    fk.freeze(model, "model.embed_tokens")
    model.gradient_checkpointing_enable({"use_reentrant": True})
    model.enable_input_require_grads()
    model.train()
    return supervised(model, lambda: model(input_ids=WORDS, use_cache=False).logits)


class Int8Linear(nn.Module):
    """A weight in 8 bits with a scale, frozen, as quantisers leave it."""

    scale: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 4, dtype=torch.int8), requires_grad=False)
        self.register_buffer("scale", torch.tensor(0.1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ (self.weight.float() * self.scale).T


def quantised_with_adapters() -> Setup:
    model = nn.ModuleDict(
        {
            "base": Int8Linear(),
            "lora_A": nn.Linear(4, 2, bias=False),
            "lora_B": nn.Linear(2, 4, bias=False),
            "head": nn.Linear(4, 1),
        }
    )
    model["base"].eval()

    def forward() -> torch.Tensor:
        x = torch.randn(3, 4)
        found: torch.Tensor = model["head"](model["base"](x) + model["lora_B"](model["lora_A"](x)))
        return found

    return supervised(model, forward)


def mixed_precision() -> Setup:
    model = CNN()
    fk.freeze(model, "backbone")
    model.train()

    def forward() -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found: torch.Tensor = model(images())
        return found

    return supervised(model, forward)


def accumulating_gradients() -> Setup:
    model = CNN().train()
    optimizer = adamw(model)
    model(images()).pow(2).mean().backward()  # a gradient is there already

    def step() -> None:
        model(images()).pow(2).mean().backward()

    return Setup(model, step, [optimizer])


def discriminative_rates() -> Setup:
    model = CNN().train()
    groups = [
        {"params": model.backbone.parameters(), "lr": 1e-5},
        {"params": model.head.parameters(), "lr": 1e-3},
    ]
    return supervised(model, lambda: model(images()), torch.optim.AdamW(groups))


def recurrent_head() -> Setup:
    model = nn.ModuleDict(
        {"emb": nn.Embedding(11, 4), "rnn": nn.GRU(4, 4, batch_first=True), "head": nn.Linear(4, 1)}
    )
    fk.freeze(model, "emb")

    def forward() -> torch.Tensor:
        found: torch.Tensor = model["head"](model["rnn"](model["emb"](WORDS))[0])
        return found

    return supervised(model, forward)


def everything_expected() -> Setup:
    model = CNN()
    fk.train_only(model, "head")
    model.train()
    return supervised(model, lambda: model(images()))._replace(expect="head")


SETUPS: dict[str, Callable[[], Setup]] = {
    make.__name__: make
    for make in list(globals().values())
    if callable(make)
    and getattr(make, "__annotations__", {}).get("return") == "Setup"
    and make.__name__ != "supervised"
}
DISTRIBUTED = {"ddp", "fully_sharded"}


@pytest.fixture(params=SETUPS)
def setup(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    """A set-up; those that need one in a process group of this process alone."""
    torch.manual_seed(0)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    alone = request.param in DISTRIBUTED
    if alone:
        store = f"file://{tmp_path}/store"
        dist.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    yield SETUPS[request.param]()
    if alone:
        dist.destroy_process_group()
    if request.param == "compiled":
        torch.compiler.reset()
    torch.set_num_threads(threads)


def test_there_are_enough() -> None:
    """At least 25 set-ups."""
    assert len(SETUPS) >= 25


def test_nothing_is_wrong(setup: Setup) -> None:
    """Neither before a step, nor after one, nor while it runs is there an error or warning."""
    found = fk.audit(setup.model, optimizer=setup.optimizers, expect_trainable=setup.expect)
    assert loud(found) == [], str(found)
    assert found.ok
    found = fk.audit_step(setup.model, setup.step, optimizer=setup.optimizers)
    assert loud(found) == [], str(found)
    setup.step()
    found = fk.audit(setup.model, optimizer=setup.optimizers, expect_trainable=setup.expect)
    assert loud(found) == [], str(found)
