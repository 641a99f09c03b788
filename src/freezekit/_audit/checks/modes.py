"""Checks of training modes: dropout that is on in a frozen part, learning parts in eval."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn

from freezekit._audit.added import is_added
from freezekit._audit.context import AuditContext
from freezekit._audit.findings import Finding
from freezekit._audit.mends import eval_code, mode_code, outermost_frozen
from freezekit._format import plural, shorten

__all__ = [
    "active_dropout",
    "drop_rate",
    "learning_in_eval",
    "makes_features",
    "on_cuda",
    "recurrent_in_eval",
]


def active_dropout(context: AuditContext) -> Iterator[Finding]:
    """FK203: dropout, or another random layer, is active in a frozen part.

    Its outputs differ from pass to pass: features are noisy, and cannot be cached or repeated.
    Neither ``requires_grad`` nor ``no_grad`` switches it off; ``eval()`` does, until the next
    ``model.train()``. In a frozen backbone it is a warning; between layers that learn (adapters,
    gradual unfreezing) it is the usual regularisation, and a note.
    """
    found: dict[int, float] = {}
    inventory = context.inventory
    for index in context.frozen_modules:
        module = inventory.module(index)
        rate = drop_rate(module) if module.training else 0.0
        if rate > 0:
            found[index] = rate
    if not found:
        return
    kinds = shorten(f"p={rate:g}" for rate in dict.fromkeys(found.values()))
    outermost = outermost_frozen(context, found)
    yield Finding(
        code="FK203",
        severity="warning" if makes_features(context, outermost) else "note",
        title="dropout is active in a frozen part",
        fqns=tuple(inventory.modules[index].fqn for index in found),
        cause=f"{plural(len(found), 'random module')} ({kinds}) in train mode, with all "
        "parameters around frozen: two passes over one input differ.",
        mend="Put the frozen part into eval mode after each model.train(): "
        f"{eval_code(context, outermost)}.",
    )


def makes_features(context: AuditContext, outermost: Iterable[int]) -> bool:
    """Whether one of these frozen parts is a backbone: most of the model, with nothing below it.

    Below it, or in it by way of prompts and adapters, something may learn through it: then its
    randomness regularises, and its outputs are no features to be kept.
    """
    inventory = context.inventory
    if any(info.requires_grad and is_added(info.fqn) for info in inventory.parameters):
        return False
    largest = max(outermost, key=context.subtree_numel)
    below = context.trainable_before[inventory.modules[largest].first_entry]
    return not below and 2 * context.subtree_numel(largest) >= context.total_numel


def learning_in_eval(context: AuditContext) -> Iterator[Finding]:
    """FK207: a part that learns was left in eval mode while the model is in train mode.

    Gradual unfreezing sets ``requires_grad`` and forgets the mode: dropout stays off in what now
    learns. Where nothing in the part looks at its mode, it is a note.
    """
    inventory = context.inventory
    modules = inventory.modules
    if not modules[0].training:
        return
    found: dict[int, bool] = {}
    for index, info in enumerate(modules):
        if info.training or info.repeats >= 0 or not modules[info.parent].training:
            continue
        if context.is_held(index) or (info.has_running_stats and not info.children):
            continue  # a norm held in eval is a check of its own
        if context.trainable_entries(index):
            found[index] = any(
                drop_rate(inventory.module(i)) > 0 and not modules[i].training
                for i in range(index, info.end)
            )
        elif drop_rate(inventory.module(index)) > 0 and _belongs_to_learning(context, index):
            found[index] = True
    for matters in (True, False):
        indices = [index for index, does in found.items() if does is matters]
        fqns = tuple(modules[index].fqn for index in indices)
        if fqns:
            yield Finding(
                code="FK207",
                severity="warning" if matters else "note",
                title="a part that learns is in eval mode",
                fqns=fqns,
                cause=f"{plural(len(fqns), 'module')} in eval mode while the model is in train mode"
                + (
                    ": its dropout is off."
                    if matters
                    else "; nothing in it is known to look at its mode."
                ),
                mend=f"Put it back: {mode_code(context, indices, 'train')}.",
            )


def _belongs_to_learning(context: AuditContext, index: int) -> bool:
    modules = context.inventory.modules
    if modules[index].last_entry > modules[index].first_entry:
        return False
    parent = modules[index].parent
    while parent >= 0 and modules[parent].last_entry == modules[parent].first_entry:
        parent = modules[parent].parent
    return parent >= 0 and context.trainable_entries(parent) > 0 and index not in context.frozen_set


def recurrent_in_eval(context: AuditContext) -> Iterator[Finding]:
    """FK208: a recurrent layer in eval mode through which gradients must flow.

    cuDNN has no backward pass for a recurrent layer in eval: on a GPU, ``backward()`` raises "cudnn
    RNN backward can only be called in training mode". A frozen recurrent layer above something that
    learns stays in train mode, with its dropout set to 0.
    """
    inventory = context.inventory
    found = []
    for index in context.modules_of(nn.RNNBase.__name__):
        info = inventory.modules[index]
        # Whatever learns before it in the model's order, or in it, needs its backward pass.
        if not info.training and context.trainable_before[info.last_entry]:
            found.append(index)
    if not found or not (context.in_training or context.optimizers):
        return
    fqns = tuple(inventory.modules[index].fqn for index in found)
    on_gpu = any(on_cuda(inventory.module(index)) for index in found)
    kinds = shorten(dict.fromkeys(inventory.modules[index].type_name for index in found))
    yield Finding(
        code="FK208",
        severity="warning" if on_gpu else "note",
        title="a recurrent layer in eval mode lies in the gradients' way",
        fqns=fqns,
        cause=f"{plural(len(fqns), 'module')} ({kinds}) in eval mode, with trainable parameters in "
        "it or before it: cuDNN's backward pass raises in eval mode"
        + (" on this GPU." if on_gpu else "; on the CPU it runs."),
        mend=f"Leave it in train mode, without dropout: {mode_code(context, found, 'train')}, and "
        "set its "
        "dropout to 0.",
    )


def on_cuda(module: nn.Module) -> bool:
    """Whether the module's parameters are on a CUDA device."""
    return any(parameter.is_cuda for parameter in module.parameters())


def drop_rate(module: nn.Module) -> float:
    """The rate at which a module drops at random in train mode; 0 if it does not."""
    kind = type(module).__name__
    if isinstance(module, nn.RNNBase):
        rate: Any = module.dropout if module.num_layers > 1 else 0.0
    elif isinstance(module, nn.MultiheadAttention):
        rate = module.dropout
    elif isinstance(module, nn.RReLU):
        rate = module.upper - module.lower
    elif "Drop" in kind or "StochasticDepth" in kind:
        rate = getattr(module, "p", getattr(module, "drop_prob", 0.0))
    else:
        return 0.0
    return float(rate) if isinstance(rate, int | float) else 0.0
