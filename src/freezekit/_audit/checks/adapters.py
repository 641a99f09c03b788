"""Checks of adapters, peft's or hand-made: there, and not learning."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from freezekit._audit.added import is_adapter
from freezekit._audit.context import AuditContext
from freezekit._audit.findings import Finding
from freezekit._audit.mends import as_argument
from freezekit._format import plural, shorten

__all__ = ["active_adapter_frozen", "constant_learns", "no_adapter_learns"]

# What the libraries peft and adapters set on a model that they changed.
_ADAPTED = frozenset({"peft_config", "adapters_config"})


def no_adapter_learns(context: AuditContext) -> Iterator[Finding]:
    """FK701: the model has adapters, and none of their parameters is trainable.

    A helper that freezes everything ran after the adapters were put in; an adapter was loaded
    without ``is_trainable=True``; code that switches off what is no adapter never switches on what
    is.
    """
    parameters = context.inventory.parameters
    adapted = bool(context.modules_with(_ADAPTED.__contains__))
    found = [
        index for index, info in enumerate(parameters) if is_adapter(info.fqn, adapted=adapted)
    ]
    if not found or any(parameters[index].requires_grad for index in found):
        return
    fqns = tuple(parameters[index].fqn for index in found)
    rest = sum(info.requires_grad for info in parameters)
    yield Finding(
        code="FK701",
        severity="warning" if rest else "error",
        title="none of the adapters' parameters is trainable",
        fqns=fqns,
        cause=f"0 of {plural(len(fqns), 'adapter tensor')} trainable"
        + (
            f", while {plural(rest, 'other tensor')} learn."
            if rest
            else "; nothing else is either."
        ),
        mend=f"Unfreeze them: freezekit.unfreeze(model, {as_argument(context, fqns)}), or "
        "load them with PeftModel.from_pretrained(..., is_trainable=True).",
    )


def active_adapter_frozen(context: AuditContext) -> Iterator[Finding]:
    """FK702: the active adapter is frozen, and another one, which is not used, is trainable.

    ``add_adapter`` and ``load_adapter`` leave the adapter from before active; ``set_adapter``
    switches both use and flags, unless flags were set by hand after it.
    """
    inventory = context.inventory
    frozen: dict[str, None] = {}
    learning: dict[str, None] = {}
    fqns: list[str] = []
    for index in context.modules_of("BaseTunerLayer"):
        info, module = inventory.modules[index], inventory.module(index)
        active = _active_adapters(module)
        for entry in inventory.entries[info.first_entry : info.last_entry]:
            name = _adapter_of(entry.raw[len(info.raw) + 1 :], module)
            if name is None:
                continue
            learns = inventory.parameters[entry.parameter].requires_grad
            if name in active and not learns:
                frozen[name] = None
                fqns.append(entry.fqn)
            elif name not in active and learns:
                learning[name] = None
    if frozen and learning:
        name = next(iter(learning))
        yield Finding(
            code="FK702",
            severity="warning",
            title="the active adapter is frozen, another one learns and is not used",
            fqns=tuple(fqns),
            cause=f"active: {shorten(frozen)} ({plural(len(fqns), 'frozen tensor')}); trainable "
            "and "
            f"not active: {shorten(learning)}.",
            mend=f'Use the one that is to learn: model.set_adapter("{name}").',
        )


def constant_learns(context: AuditContext) -> Iterator[Finding]:
    """FK704: what an adapter's class keeps as a constant is trainable.

    peft's layers tell what they hold beside an adapter's weights (``other_param_names``), such as
    the rank that AdaLoRA divides by. Where it is trainable an optimizer changes it, and autograd
    keeps what it is multiplied with: in AdaLoRA the output of every adapter. peft 0.21.0 to 0.21.2
    (measured) leave AdaLoRA so on a base in half precision, whose adapters they cast.
    """
    inventory = context.inventory
    found: dict[str, None] = {}
    constants: dict[str, None] = {}
    for index in context.modules_of("BaseTunerLayer"):
        info, module = inventory.modules[index], inventory.module(index)
        others: Any = getattr(module, "other_param_names", ())
        for entry in inventory.entries[info.first_entry : info.last_entry]:
            name = entry.raw[len(info.raw) + 1 :].partition(".")[0]
            if name in others and inventory.parameters[entry.parameter].requires_grad:
                found[entry.fqn] = None
                constants[f"{info.type_name}.{name}"] = None
    if found:
        fqns = tuple(found)
        yield Finding(
            code="FK704",
            severity="warning",
            title="constants of adapters are trainable",
            fqns=fqns,
            cause=f"{plural(len(fqns), 'tensor')} trainable that the class keeps beside the "
            f"adapter's weights: {shorten(constants)}.",
            mend=f"Freeze them: freezekit.freeze(model, {as_argument(context, fqns)}).",
        )


def _active_adapters(module: nn.Module) -> frozenset[str]:
    active: Any = getattr(module, "active_adapters", ())
    return frozenset([active] if isinstance(active, str) else active)


def _adapter_of(name: str, module: nn.Module) -> str | None:
    """The adapter's name in ``lora_A.default.weight``, if the name is an adapter's parameter."""
    parts = name.split(".")
    layers: Any = getattr(module, "adapter_layer_names", ())
    return parts[1] if len(parts) > 1 and parts[0] in layers else None
