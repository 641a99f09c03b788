"""Backbones with something special about each, and comparisons to the bit."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import BertConfig, BertModel, GPT2Config, GPT2Model, LlamaConfig, LlamaModel


def make_bert(**options: Any) -> BertModel:
    """A BERT of two layers and width 16."""
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=50,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=32,
        **options,
    )
    return BertModel(config)


def make_gpt2() -> GPT2Model:
    """A GPT-2 of two layers and width 16."""
    torch.manual_seed(0)
    options = {"bos_token_id": 0, "eos_token_id": 0}
    return GPT2Model(
        GPT2Config(vocab_size=50, n_positions=32, n_embd=16, n_layer=2, n_head=2, **options)
    )


def make_llama() -> LlamaModel:
    """A Llama of two layers and width 16, with rotary positions."""
    torch.manual_seed(0)
    return LlamaModel(
        LlamaConfig(
            vocab_size=50,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            max_position_embeddings=32,
            pad_token_id=0,
        )
    )


def token_batch(lengths: list[int], *, side: str = "right", seed: int = 0) -> dict[str, Tensor]:
    """Token ids 1 to 49 with padding 0 and their mask, (batch, longest)."""
    generator = torch.Generator().manual_seed(seed)
    longest = max(lengths)
    ids = torch.randint(1, 50, (len(lengths), longest), generator=generator)
    mask = torch.zeros_like(ids)
    for row, length in enumerate(lengths):
        if side == "right":
            mask[row, :length] = 1
        else:
            mask[row, longest - length :] = 1
    return {"input_ids": ids * mask, "attention_mask": mask}


class ConvNet(nn.Module):
    """A convolution, a norm with statistics, an in-place ReLU and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.act = nn.ReLU(inplace=True)
        self.drop = nn.Dropout(0.5)
        self.fc = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.drop(self.act(self.norm(self.conv(x))))
        result: Tensor = self.fc(x.mean((2, 3)))
        return result


def make_convnet() -> ConvNet:
    """A ConvNet whose statistics are no longer a fresh norm's."""
    torch.manual_seed(0)
    net = ConvNet()
    with torch.no_grad():
        net(torch.randn(16, 3, 8, 8) * 3 + 1)
    return net


class FunctionalDropout(nn.Module):
    """A dropout that no mode switches off."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(self.linear(x), 0.5)


class SwitchesGradientsOn(nn.Module):
    """A backbone with a forward that calls ``enable_grad``, and a tensor that is no parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.prompt = torch.ones(4, requires_grad=True)

    def forward(self, x: Tensor) -> dict[str, Any]:
        with torch.enable_grad():
            out = self.linear(x * self.prompt)
            return {"out": out, "nested": [(out + 1, 3)], "name": "x"}


class RootParameter(nn.Module):
    """A parameter that belongs to the root, as a class token does."""

    def __init__(self) -> None:
        super().__init__()
        self.cls_token = nn.Parameter(torch.zeros(1, 1, 4))
        self.body = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([self.cls_token.expand(x.shape[0], -1, -1), x], dim=1)
        result: Tensor = self.body(x)
        return result


class Unrolled(nn.Module):
    """One layer that runs three times, then another one."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Linear(4, 4)
        self.last = nn.Linear(4, 4)
        self.unused = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = torch.tanh(self.shared(x))
        result: Tensor = self.last(x)
        return result


def bare(backbone: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """What the backbone gives by itself, in eval and without gradients."""
    with torch.no_grad():
        return backbone.eval()(*args, **kwargs)


def state(backbone: nn.Module) -> dict[str, Tensor]:
    """A copy of all parameters and buffers."""
    tensors = {**dict(backbone.named_parameters()), **dict(backbone.named_buffers())}
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def unchanged(before: dict[str, Tensor], backbone: nn.Module) -> bool:
    """Whether no bit of the backbone moved."""
    after = state(backbone)
    return before.keys() == after.keys() and all(torch.equal(before[n], after[n]) for n in after)
