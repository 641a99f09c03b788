"""Checks of what was wrapped around a model: DDP, FSDP, checkpointing, compilation."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from freezekit import _wrappers
from freezekit._audit.context import AuditContext
from freezekit._audit.findings import Finding
from freezekit._fold import fold_names
from freezekit._format import format_bytes, plural, shorten

__all__ = [
    "compiled_for_other_flags",
    "ddp_before_freezing",
    "mixed_fsdp_unit",
    "reentrant_below_frozen",
]


def mixed_fsdp_unit(context: AuditContext) -> Iterator[Finding]:
    """FK501: an FSDP unit has frozen and trainable parameters.

    FSDP's first version flattens a unit into one parameter: mixed flags raise when it is built, or,
    with ``use_orig_params=True``, keep gradient memory for the frozen ones too. With
    ``fully_shard`` they work; frozen weights are then gathered again in the backward pass of their
    unit: a note.
    """
    inventory = context.inventory
    by_version: dict[bool, list[tuple[str, list[str]]]] = {}
    for index in context.modules_of("FullyShardedDataParallel", "FSDPModule"):
        info = inventory.modules[index]
        first = _wrappers.is_kind(inventory.module(index), "FullyShardedDataParallel")
        flags: dict[bool, list[str]] = {True: [], False: []}
        for parameter in _unit(context, index):
            found = inventory.parameters[parameter]
            flags[found.requires_grad].append(found.fqn)
        if flags[True] and flags[False]:
            by_version.setdefault(first, []).append((info.fqn or "the root unit", flags[False]))
    for first, units in by_version.items():
        fqns = tuple(fqn for _, frozen in units for fqn in frozen)
        named = shorten(fold_names(name for name, _ in units))
        yield Finding(
            code="FK501",
            severity="warning" if first else "note",
            title="an FSDP unit has frozen and trainable parameters",
            fqns=fqns,
            cause=f"{plural(len(units), 'unit')} ({named}) with "
            f"{plural(len(fqns), 'frozen tensor')} "
            "beside trainable ones"
            + (": gradients are reduced and kept for all of it." if first else "."),
            mend="Wrap frozen and trainable parts as units of their own, after freezing, such as "
            "fully_shard(model.head); fully_shard(model)."
            if first
            else "Nothing has to be done; units of one kind save gathering the frozen part again.",
        )


def _unit(context: AuditContext, index: int) -> set[int]:
    """Parameters of an FSDP unit: those below it that are in no unit of their own."""
    inventory = context.inventory
    info = inventory.modules[index]
    found: set[int] = set()
    position = index
    while position < info.end:
        module = inventory.module(position)
        if position > index and _wrappers.is_kind(module, "FullyShardedDataParallel", "FSDPModule"):
            position = inventory.modules[position].end
            continue
        found |= {inventory.entries[i].parameter for i in context.own_entries(position)}
        position += 1
    return found


def ddp_before_freezing(context: AuditContext) -> Iterator[Finding]:
    """FK502: ``DistributedDataParallel`` was built before flags changed.

    It notes at construction which parameters will have gradients. What is frozen after that it
    waits
    for: "Expected to have finished reduction in the prior iteration". What is unfrozen after that
    it does not reduce: each rank trains it on its own batches, the ranks drift apart, and nothing
    is said.
    """
    inventory = context.inventory
    for index in context.modules_of("DistributedDataParallel"):
        info, module = inventory.modules[index], inventory.module(index)
        expected = _wrappers.gradients_ddp_expects(module)
        if expected is None:
            continue
        ignored = _wrappers.parameters_ddp_ignores(module)
        below = len(info.raw) + len(".module." if info.raw else "module.")
        now = {
            id(tensor): tensor
            for entry in inventory.entries[info.first_entry : info.last_entry]
            if entry.raw[below:] not in ignored
            for tensor in inventory.tensors(entry.parameter)
            if tensor.requires_grad
        }
        found = (len(now), sum(tensor.numel() * tensor.itemsize for tensor in now.values()))
        if found == expected:
            continue
        thawed = found[0] > expected[0] or found[1] > expected[1]
        fqns = tuple(
            entry.fqn
            for entry in inventory.entries[info.first_entry : info.last_entry]
            if inventory.parameters[entry.parameter].requires_grad is thawed
        )
        yield Finding(
            code="FK502",
            severity="error",
            title="DistributedDataParallel was built before flags changed",
            fqns=fqns,
            cause=f"It was built for {plural(expected[0], 'gradient')} "
            f"({format_bytes(expected[1])}), "
            f"and {plural(found[0], 'tensor')} ({format_bytes(found[1])}) are trainable now: "
            + (
                "what was unfrozen since is not averaged, and the ranks drift apart."
                if thawed
                else "it waits for gradients of what was frozen since, and raises."
            ),
            mend="Freeze first and wrap then: model = DistributedDataParallel(model.module).",
        )


def reentrant_below_frozen(context: AuditContext) -> Iterator[Finding]:
    """FK503: a reentrant checkpoint around parameters that learn, over inputs that do not.

    ``torch.utils.checkpoint`` with ``use_reentrant=True`` gives gradients to what is inside only if
    one of its inputs requires one. Over frozen embeddings none does: the blocks' parameters get no
    gradient, a warning is printed once, and the loss may still fall, since the head learns.
    """
    inventory = context.inventory
    found: list[str] = []
    for index in _checkpointed(context):
        info = inventory.modules[index]
        if context.trainable_before[info.first_entry] or _lets_inputs_require(context, index):
            break  # from here on inputs require a gradient
        found.extend(
            entry.fqn
            for entry in inventory.entries[info.first_entry : info.last_entry]
            if inventory.parameters[entry.parameter].requires_grad
        )
    if found:
        yield Finding(
            code="FK503",
            severity="error",
            title="a reentrant checkpoint cuts off gradients: its inputs require none",
            fqns=tuple(found),
            cause=f"{plural(len(found), 'trainable tensor')} under a checkpoint with "
            "use_reentrant=True, and nothing that learns before it.",
            mend="Use the other kind: model.gradient_checkpointing_enable("
            'gradient_checkpointing_kwargs={"use_reentrant": False}); or '
            "model.enable_input_require_grads().",
        )


def _checkpointed(context: AuditContext) -> list[int]:
    """The modules that are run in a reentrant checkpoint, in order.

    A model that checkpoints its blocks says so itself: then its numbered children are meant.
    """
    inventory = context.inventory
    modules = inventory.modules
    saying = [
        index
        for index in dict.fromkeys(
            index for index, _ in context.modules_with(_wrappers.CHECKPOINTING.__contains__)
        )
        if _wrappers.checkpoints_reentrantly(inventory.module(index))
    ]
    units: list[int] = []
    for position, index in enumerate(saying):
        inner = position + 1 < len(saying) and saying[position + 1] < modules[index].end
        if _wrappers.is_kind(inventory.module(index), "GradientCheckpointingLayer") or not (
            inner or any(modules[child].numbered for child in modules[index].children)
        ):
            units.append(index)
        elif not inner:
            units += [i for child in modules[index].children for i in modules[child].numbered]
    return units


def _lets_inputs_require(context: AuditContext, index: int) -> bool:
    """Whether a forward hook before the checkpoint may make its inputs require a gradient."""
    inventory = context.inventory
    return any(
        vars(inventory.module(i))["_forward_hooks"]
        for i in range(index)
        if not inventory.modules[i].children
    )


def compiled_for_other_flags(context: AuditContext) -> Iterator[Finding]:
    """FK504: a module was compiled for other flags than it has now.

    torch compiles it again at its next call, which takes time; where it does not (older versions,
    ``torch.compiler.set_stance("fail_on_recompile")``, a limit of recompilations), a layer that was
    unfrozen silently does not learn.
    """
    inventory = context.inventory
    wrapped = context.modules_of("OptimizedModule")
    called = [index for index, _ in context.modules_with("_compiled_call_impl".__eq__)]
    for index in sorted({*wrapped, *called}):
        info, module = inventory.modules[index], inventory.module(index)
        if not _wrappers.is_compiled(module):
            continue
        compiled = _wrappers.flags_compiled_for(module)
        inner = _inner_of(module)
        now = {name: p.requires_grad for name, p in inner.named_parameters(remove_duplicate=False)}
        changed: list[list[str]] = [
            [n for n, flag in flags.items() if now[n] != flag] for flags in compiled
        ]
        if not changed or not all(changed):
            continue
        # Of several compiled forms the one that is nearest.
        nearest = changed[[len(found) for found in changed].index(min(map(len, changed)))]
        names = [name for name in now if name in set(nearest)]
        prefix = f"{info.fqn}." if info.fqn else ""
        yield Finding(
            code="FK504",
            severity="note",
            title="a module was compiled for other flags",
            fqns=tuple(f"{prefix}{name}" for name in names),
            cause=f"{plural(len(names), 'tensor')} changed requires_grad since "
            f"{info.fqn or 'the model'} was compiled.",
            mend="It is compiled again at its next call; to be sure, call torch.compiler.reset() "
            "after "
            "the last change.",
        )


def _inner_of(module: nn.Module) -> nn.Module:
    inner = getattr(module, "_orig_mod", module)
    return inner if isinstance(inner, nn.Module) else module
