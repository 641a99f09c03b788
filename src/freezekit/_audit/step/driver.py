"""audit_step: run a step, watch it, put everything back, and say what was wrong."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import nn

from freezekit import _wrappers
from freezekit._audit.checks import Check
from freezekit._audit.context import AuditContext
from freezekit._audit.driver import Optimizers, make_context, make_report
from freezekit._audit.expectation import ExpectedTrainable
from freezekit._audit.report import AuditReport
from freezekit._audit.running import check_codes, run_checks
from freezekit._audit.step.checks import DEFAULT_STEP_CHECKS
from freezekit._audit.step.graphs import NewGraphs
from freezekit._audit.step.record import Change, StepRecord
from freezekit._audit.step.state import SavedState, SnapshotKind
from freezekit._audit.step.tensors import tensors_in
from freezekit._audit.step.watch import Watcher
from freezekit._collector import collector_paused
from freezekit.errors import UnsupportedModelError

__all__ = ["audit_step"]

_KINDS = ("copy", "hash")
_AFTER = ("restore", "keep")


def audit_step(
    model: nn.Module,
    step: Callable[[], object],
    *,
    optimizer: Optimizers = None,
    expect_trainable: ExpectedTrainable | None = None,
    snapshot: SnapshotKind = "copy",
    after: Literal["restore", "keep"] = "restore",
    checks: Iterable[Check] = DEFAULT_STEP_CHECKS,
    ignore: Iterable[str] = (),
) -> AuditReport:
    """Run one training step, watch it, put everything back, and tell what was wrong.

    >>> import torch
    >>> from torch import nn
    >>> model = nn.ModuleDict({"backbone": nn.Linear(3, 3), "head": nn.Linear(3, 1)})
    >>> def step():
    ...     with torch.no_grad():
    ...         features = model["backbone"](torch.ones(2, 3))
    ...     model["head"](features).sum().backward()
    >>> [(f.code, f.fqns) for f in audit_step(model, step).findings if f.severity == "error"]
    [('FK803', ('backbone.weight', 'backbone.bias'))]
    >>> model["head"].weight.grad is None  # as it was
    True

    Afterwards parameters, buffers, gradients, flags, modes, what is registered, the optimizers'
    groups and state, and the random states of torch, Python and numpy are as they were. What the
    step owns besides is not: data that it took from an iterator, a scheduler's counter, a
    GradScaler.

    Modules are watched by hooks, which are taken off again; not inside of what is compiled, and a
    ``TransformerEncoder`` does not take its fast path while hooks are on it. In a distributed run,
    call it on all ranks.

    Args:
        model: any ``nn.Module`` without uninitialised parameters.
        step: called once, without arguments: forward, backward and, if it likes,
            ``optimizer.step()``
            and ``zero_grad()``. What it raises becomes a finding (FK801).
        optimizer: as for :func:`audit`. Optimizers that step are seen and put back in any case.
        expect_trainable: as for :func:`audit`.
        snapshot: ``"copy"`` copies all values, to compare them and put them back: one more copy of
            parameters, buffers, gradients and optimizer state. ``"hash"`` keeps digests of frozen
            parameters instead, 1/1024 of their size: a change of theirs is found, and
            cannot be undone.
        after: ``"keep"`` leaves everything as the step left it.
        checks: the checks to run; your own are added as ``(*DEFAULT_STEP_CHECKS, mine)``, and find
            what
            was seen in ``context.step``.
        ignore: codes of findings to leave out.

    Returns:
        The report of :func:`audit` on the model as it was before, with what the step showed;
        ``report.step`` has its time and what the snapshot took.

    Raises:
        UnsupportedModelError, OptimizerError, PatternError, UnmatchedPatternError,
        FreezeStateError: as :func:`audit`; also for a model with uninitialised parameters.
        TypeError: ``step`` cannot be called without arguments, or is a generator or coroutine.
        ValueError: an unknown ``snapshot``, ``after`` or code.
    """
    checks = tuple(checks)
    ignored = check_codes(checks, ignore)
    _check_choice("snapshot", snapshot, _KINDS)
    _check_choice("after", after, _AFTER)
    _check_step(step)
    with collector_paused():
        context = make_context(model, optimizer, expect_trainable)
    for info in context.inventory.parameters:
        if info.layout == "lazy":
            raise UnsupportedModelError(
                f"{info.fqn!r} is not initialised yet: run one forward before audit_step", info.fqn
            )
    record = _run(context, step, snapshot, keep=after == "keep")
    known = {id(found) for found in context.optimizers}
    stepped = tuple(found for found in record.optimizers if id(found) not in known)
    context = replace(context, optimizers=(*context.optimizers, *stepped), step=record)
    with collector_paused():
        return make_report(context, run_checks(context, checks, ignored), checks)


def _check_choice(name: str, value: object, known: tuple[str, ...]) -> None:
    if value not in known:
        expected = " or ".join(map(repr, known))
        raise ValueError(f"{name}: expected {expected}, got {value!r}")


def _check_step(step: Any) -> None:
    if not callable(step):
        raise TypeError(
            f"step: expected a function without arguments that runs one training step, got "
            f"{type(step).__name__}"
        )
    kind = step if inspect.isroutine(step) else type(step).__call__
    if inspect.isgeneratorfunction(kind) or inspect.iscoroutinefunction(kind):
        raise TypeError(
            "step: expected a plain function; a generator or coroutine does not run here"
        )
    try:
        signature = inspect.signature(step)
    except (TypeError, ValueError):  # some builtins have none
        return
    needed = [
        parameter.name
        for parameter in signature.parameters.values()
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    ]
    if needed:
        raise TypeError(
            f"step: it is called without arguments, and needs {', '.join(needed)}; pass "
            f"lambda: step({', '.join(needed)})"
        )


def _run(
    context: AuditContext, step: Callable[[], object], kind: SnapshotKind, *, keep: bool
) -> StepRecord:
    record = StepRecord(snapshot=kind)
    start = time.perf_counter()
    try:
        with collector_paused():
            saved = SavedState(context.model, context.inventory, kind)
            for optimizer in context.optimizers:
                saved.add_optimizer(optimizer)
    except torch.OutOfMemoryError as error:
        error.add_note(
            "audit_step was copying what the step may change, to put it back; snapshot='hash' "
            "keeps digests of frozen parameters instead. Nothing was run, nothing was changed."
        )
        raise
    try:
        grad_mode = torch.is_grad_enabled()
        watcher = Watcher(context, saved, record)
        with NewGraphs() as graphs, watcher:
            began = time.perf_counter()
            returned: Any = None
            try:
                returned = step()
            except Exception as error:  # noqa: BLE001  # it becomes a finding
                if watcher.raised[0] is error:
                    record.raised_in = watcher.raised[1]
                record.error = error.with_traceback(None)
                record.error.__context__ = record.error.__cause__ = None
            record.seconds = time.perf_counter() - began
            watcher.note_flags(gradients=True)
        torch.set_grad_enabled(grad_mode)
        watcher.raised = (None, -1)
        record.returned_graph = any(t.requires_grad for t in tensors_in(returned))
        del returned
        record.kept = graphs.kept(context, watcher.outputs)
        with collector_paused():
            _note_changes(context, saved, watcher, record, keep=keep)
    finally:
        # What FSDP2 has gathered would otherwise stand where its shards are put back.
        _wrappers.reshard(context.model)
        with collector_paused():
            record.restored = not keep and saved.restore()
    record.snapshot_bytes = saved.nbytes
    record.watched_seconds = time.perf_counter() - start
    return record


def _note_changes(
    context: AuditContext, saved: SavedState, watcher: Watcher, record: StepRecord, *, keep: bool
) -> None:
    """What has other values now, and by what."""
    inventory = context.inventory
    by_optimizer = set(record.moved)
    record.moved = set()
    for index, tensors in saved.changed_parameters.items():
        record.moved.add(index)
        info = inventory.parameters[index]
        by = "step"
        if index in by_optimizer:
            by = "optimizer"
        elif "forward" in watcher.moved_by.get(info.owner, ()):
            by = "forward"
        possible = all(tensor.copy is not None for tensor in tensors)
        record.changes.append(Change(info.fqn, index, info.owner, by, possible and not keep))
    place: dict[int, int] = {}
    for index, module_info in enumerate(inventory.modules):
        if module_info.repeats < 0:
            place[id(inventory.module(index))] = index
    named = {(info.owner, info.fqn.rpartition(".")[2]): info for info in inventory.buffers}
    for module, name, _ in saved.changed_buffers():
        owner = place.get(id(module), -1)
        buffer = named.get((owner, name))
        if buffer is None or not buffer.saved:
            continue
        by = "forward" if "forward" in watcher.moved_by.get(owner, ()) else "step"
        record.changes.append(Change(buffer.fqn, -1, owner, by, not keep))
