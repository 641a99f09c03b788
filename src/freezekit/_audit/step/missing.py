"""Checks of trainable parameters that received no gradient, each with its cause."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from freezekit._audit.context import AuditContext
from freezekit._audit.findings import Finding
from freezekit._audit.mends import as_argument
from freezekit._audit.step.causes import Kind, causes_of_missing
from freezekit._format import format_count, plural

__all__ = [
    "cut_off",
    "in_reentrant_checkpoint",
    "lost_by_autocast",
    "not_in_the_loss",
    "under_inference_mode",
    "under_no_grad",
]

_DDP = (
    'DistributedDataParallel would raise ("Expected to have finished reduction"), since it waits '
    "for them"
)


def under_no_grad(context: AuditContext) -> Iterator[Finding]:
    """FK803: trainable parameters whose module runs under ``torch.no_grad()``.

    They are trainable by their flags alone: they cannot receive a gradient, are counted as
    learning, cost a place in the optimizer, and make ``DistributedDataParallel`` raise. Taking the
    ``no_grad`` away later makes them learn without a word.
    """
    for lack in _missing(context, "no_grad"):
        yield Finding(
            code="FK803",
            severity="error",
            title="trainable parameters run under no_grad",
            fqns=lack.fqns,
            cause=f"{lack.figures} marked trainable that cannot receive a gradient, because "
            f"{lack.name} runs under torch.no_grad(); {_DDP}.",
            mend="If they are not to learn, say so: freezekit.freeze(model, "
            f"{as_argument(context, lack.fqns)}); if they are, call {lack.name} outside of "
            "torch.no_grad().",
        )


def under_inference_mode(context: AuditContext) -> Iterator[Finding]:
    """FK804: trainable parameters whose module runs under ``torch.inference_mode()``.

    As under ``no_grad`` they cannot receive a gradient; and what comes out of it cannot enter a
    computation that is trained: "Inference tensors cannot be saved for backward".
    """
    for lack in _missing(context, "inference"):
        yield Finding(
            code="FK804",
            severity="error",
            title="trainable parameters run under inference_mode",
            fqns=lack.fqns,
            cause=f"{lack.figures} marked trainable that cannot receive a gradient, because "
            f"{lack.name} runs under torch.inference_mode(); {_DDP}.",
            mend="If they are not to learn: freezekit.freeze(model, "
            f"{as_argument(context, lack.fqns)}), and "
            f"run {lack.name} under torch.no_grad(); if they are, call it outside of both.",
        )


def in_reentrant_checkpoint(context: AuditContext) -> Iterator[Finding]:
    """FK805: trainable parameters inside a reentrant checkpoint that got no gradient.

    Its forward runs without gradients, and is only run again with them if one of its inputs
    requires a gradient. Over frozen embeddings none does.
    """
    for lack in _missing(context, "checkpoint"):
        yield Finding(
            code="FK805",
            severity="error",
            title="a reentrant checkpoint cut off gradients",
            fqns=lack.fqns,
            cause=f"{lack.figures} in "
            f"{lack.name} without a gradient: it runs in a checkpoint with "
            f"use_reentrant=True whose inputs require none; {_DDP}.",
            mend="Use checkpoint(..., use_reentrant=False); with transformers: "
            "model.gradient_checkpointing_enable(gradient_checkpointing_kwargs="
            '{"use_reentrant": False}), or model.enable_input_require_grads().',
        )


def cut_off(context: AuditContext) -> Iterator[Finding]:
    """FK806: gradients are cut off: by ``detach()``, ``no_grad``, an operation without gradient.

    The module ran with gradients on, and the way from its output to the loss is cut: inside it,
    inside a module around it, or between it and the next one.
    """
    step = context.step
    if step is None or step.error is not None:
        return  # what would have come is not known
    for kind in ("cut_inside", "cut_between"):
        for lack in _missing(context, kind):
            where = (
                f"inside the forward of {lack.name}, whose output requires no gradient"
                if kind == "cut_inside"
                else f"between {lack.name} and {_name(context, lack.other)}, which gets its input "
                "without "
                "a graph"
            )
            yield Finding(
                code="FK806",
                severity="error",
                title="gradients are cut off",
                fqns=lack.fqns,
                cause=f"{lack.figures} marked "
                f"trainable and without a gradient: it is cut off {where} (detach, no_grad, .data, "
                f"argmax); {_DDP}.",
                mend="If they are not to learn: freezekit.freeze(model, "
                f"{as_argument(context, lack.fqns)}); "
                "if they are, take the detach() or no_grad away there.",
            )


def not_in_the_loss(context: AuditContext) -> Iterator[Finding]:
    """FK807: trainable parameters that the loss does not depend on.

    A module that forward never calls (a pooler of which the output is not used, the last block when
    the last but one's features are taken, an expert that no token chose), or whose result goes
    nowhere.
    """
    step = context.step
    if step is None or step.error is not None or not step.gradients:
        return
    reasons = {
        "not_called": "{name} was not called in this step",
        "not_used": "the forward of {name} does not use them",
        "not_reached": "the result of {name} is not used by the loss, or is cut off from it "
        "(detach, argmax, item)",
    }
    for kind, reason in reasons.items():
        for lack in _missing(context, kind):
            yield Finding(
                code="FK807",
                severity="warning",
                title="trainable parameters are not in the loss",
                fqns=lack.fqns,
                cause=f"{lack.figures} without a "
                f"gradient: {reason.format(name=lack.name)}; {_DDP}.",
                mend="If they are not needed: freezekit.freeze(model, "
                f"{as_argument(context, lack.fqns)}).",
            )


def lost_by_autocast(context: AuditContext) -> Iterator[Finding]:
    """FK808: autocast lost gradients, or a compiled module kept old flags.

    Under autocast a weight's cast that was made under ``no_grad`` may be used again with gradients
    on: the weight then gets none. In a compiled module, code that was compiled while a parameter
    was frozen may go on running.
    """
    for lack in _missing(context, "autocast"):
        yield Finding(
            code="FK808",
            severity="error",
            title="autocast's cached casts have no gradient",
            fqns=lack.fqns,
            cause=f"{plural(len(lack.fqns), 'tensor')} without a gradient: {lack.name} ran under "
            "no_grad and then with gradients on within one autocast, and its output required none.",
            mend="Call torch.clear_autocast_cache() between the two, or leave autocast between "
            "them.",
        )
    for lack in _missing(context, "compiled"):
        yield Finding(
            code="FK808",
            severity="warning",
            title="parameters in a compiled module got no gradient",
            fqns=lack.fqns,
            cause=f"{plural(len(lack.fqns), 'tensor')} in {lack.name}, which is compiled and was "
            "not looked into, without a gradient.",
            mend="If their flags changed since it was compiled, call torch.compiler.reset(); to "
            "see the "
            "cause, audit the step of the model before torch.compile.",
        )


class _Lack(NamedTuple):
    """Parameters that got no gradient by one cause, as findings name them.

    Attributes:
        fqns: theirs.
        figures: how many tensors and parameters that is.
        name: the module that the cause is at.
        other: another one that it is about.
    """

    fqns: tuple[str, ...]
    figures: str
    name: str
    other: int


def _missing(context: AuditContext, kind: Kind | str) -> Iterator[_Lack]:
    for cause, indices in causes_of_missing(context).items():
        if cause.kind != kind:
            continue
        infos = [context.inventory.parameters[index] for index in indices]
        numel = format_count(sum(info.numel for info in infos))
        yield _Lack(
            tuple(info.fqn for info in infos),
            f"{plural(len(infos), 'tensor')} ({numel} parameters)",
            _name(context, cause.module),
            cause.other,
        )


def _name(context: AuditContext, index: int) -> str:
    return context.inventory.modules[index].fqn or "the model"
