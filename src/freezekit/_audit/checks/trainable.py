"""Checks of what is trainable: nothing, the wrong things, blocks that differ."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from freezekit._audit.added import is_added
from freezekit._audit.context import AuditContext
from freezekit._audit.findings import Finding
from freezekit._audit.mends import as_argument
from freezekit._fold import fold_names
from freezekit._format import plural, shorten

__all__ = ["loose_parameters", "nothing_trainable", "unexpected_trainable"]


def nothing_trainable(context: AuditContext) -> Iterator[Finding]:
    """FK101: no parameter requires a gradient, so that no step can change anything.

    Often a pattern swallowed the head, or a helper that prepares a model for adapters froze the
    adapters too. The loss then has no gradient: ``backward()`` raises, or, where the loss itself
    was made to require one, runs and trains nothing.
    """
    parameters = context.inventory.parameters
    if any(info.requires_grad for info in parameters):
        return
    last = parameters[-1].fqn.rpartition(".")[0] if parameters else ""
    yield Finding(
        code="FK101",
        severity="error",
        title="nothing is trainable",
        fqns=(),
        cause=f"All {context.total_numel:,} parameters ({plural(len(parameters), 'tensor')}) "
        "are frozen."
        if parameters
        else "The model has no parameters.",
        mend=f'Unfreeze what is to learn, such as freezekit.unfreeze(model, "{last or "*"}").'
        if parameters
        else "Give it parameters, or audit the model that has them.",
    )


def unexpected_trainable(context: AuditContext) -> Iterator[Finding]:
    """FK102: the trainable parameters are not those that ``expect_trainable`` names.

    The list of what is trainable is the contract of a fine-tuning script, and much changes it
    behind its back: a trainer that switches everything on, a layer that was replaced (a resized
    embedding, a converted norm, a module sharded anew: a new ``Parameter`` is trainable), a pattern
    that matched too much or too little, a flag that was set on ``.data``, which leaves no trace.
    ``expect_trainable`` takes patterns as :func:`freezekit.freeze` does, or a
    :func:`freezekit.freeze_state` from before.
    """
    expected = context.expected
    if expected is None:
        return
    parameters = context.inventory.parameters
    now = {index for index, info in enumerate(parameters) if info.requires_grad}
    missing = sorted(expected.trainable - now)
    extra = sorted(now - expected.trainable)
    if not missing and not extra and not expected.missing:
        return
    names = [[parameters[index].fqn for index in part] for part in (missing, extra)]
    causes, mends = [], []
    if missing:
        found = len(expected.trainable) - len(missing)
        causes.append(
            f"{found:,} of {plural(len(expected.trainable), 'expected tensor')} are trainable; "
            f"frozen: {shorten(fold_names(names[0]))}"
        )
        mends.append(f"freezekit.unfreeze(model, {as_argument(context, names[0])})")
    if extra:
        causes.append(
            f"{plural(len(extra), 'tensor')} trainable and not expected to be: "
            f"{shorten(fold_names(names[1]))}"
        )
        mends.append(f"freezekit.freeze(model, {as_argument(context, names[1])})")
    if expected.missing:
        gone = shorten(fold_names(expected.missing))
        causes.append(f"{plural(len(expected.missing), 'name')} no longer in the model: {gone}")
    if expected.from_state:
        causes.append("switched by hand, or replaced by new parameters, since the state was taken")
    text = "; ".join(causes)
    yield Finding(
        code="FK102",
        severity="error",
        title="what is trainable is not what was expected",
        fqns=(*names[0], *names[1], *expected.missing),
        cause=f"{text[0].upper()}{text[1:]}.",
        mend=f"If the expectation is right: {'; '.join(mends)}."
        if mends
        else "Take the state anew: freezekit.freeze_state(model).",
    )


def loose_parameters(context: AuditContext) -> Iterator[Finding]:
    """FK104: parameters that belong to no layer were left trainable beside a frozen rest.

    Code that freezes layer by layer does not see what a model holds itself: class and position
    tokens, scales, queries. They go on learning below a frozen backbone, which also makes autograd
    keep the activations of all of it.
    """
    if context.expected is not None:
        return
    inventory = context.inventory
    parameters = inventory.parameters
    found: list[int] = []
    for index, info in enumerate(inventory.modules):
        if info.repeats >= 0 or not info.children:
            continue
        own = [inventory.entries[i] for i in context.own_entries(index)]
        loose = [
            entry.parameter
            for entry in own
            if parameters[entry.parameter].requires_grad
            and parameters[entry.parameter].numel > 1
            and not is_added(entry.fqn)
        ]
        if loose and _is_beside_frozen(context, index):
            found.extend(loose)
    if not found:
        return
    names = tuple(parameters[index].fqn for index in dict.fromkeys(found))
    numel = sum(parameters[index].numel for index in dict.fromkeys(found))
    yield Finding(
        code="FK104",
        severity="warning",
        title="parameters of no layer are trainable beside a frozen rest",
        fqns=names,
        cause=f"{plural(len(names), 'tensor')} ({numel:,} parameters) held by a module itself, "
        "while all but a small part of the layers in it are frozen.",
        mend=f"Freeze them too: freezekit.freeze(model, {as_argument(context, names)}); or say "
        "that "
        "they are meant to learn: audit(model, expect_trainable=...).",
    )


def _is_beside_frozen(context: AuditContext, index: int) -> bool:
    """Whether of the module's children with parameters most are wholly frozen, by elements.

    A layer of one or two children that adds parameters of its own (a hand-made adapter around a
    frozen layer) is such a layer's business; a model with a frozen backbone is not.
    """
    inventory = context.inventory
    info = inventory.modules[index]
    with_parameters = [
        child
        for child in info.children
        if inventory.modules[child].last_entry > inventory.modules[child].first_entry
    ]
    frozen = [child for child in with_parameters if child in context.frozen_set]
    wraps_a_leaf = len(with_parameters) == 1 and not inventory.modules[with_parameters[0]].children
    if wraps_a_leaf and info.parent >= 0:
        return _has_frozen_parent(context, index)
    numel = sum(context.subtree_numel(child) for child in with_parameters)
    return bool(frozen) and 2 * sum(context.subtree_numel(child) for child in frozen) > numel


def _has_frozen_parent(context: AuditContext, index: int) -> bool:
    """Whether most modules around a thin layer are frozen, and it alone has loose parameters.

    ViT keeps its tokens in an embedding module around one convolution: the blocks beside it tell
    whether it belongs to a frozen backbone. Adapters are in every block.
    """
    inventory = context.inventory
    siblings = [
        child
        for child in inventory.modules[inventory.modules[index].parent].children
        if child != index
        and inventory.modules[child].last_entry > inventory.modules[child].first_entry
    ]
    frozen = [child for child in siblings if child in context.frozen_set]
    sizes = Counter[bool]()
    for child in siblings:
        sizes[child in context.frozen_set] += context.subtree_numel(child)
    return bool(frozen) and sizes[True] > sizes[False]
