"""audit: take stock of a model once, and run the checks over it."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from freezekit._audit.checks import DEFAULT_CHECKS, Check
from freezekit._audit.context import AuditContext
from freezekit._audit.expectation import ExpectedTrainable, resolve_expectation
from freezekit._audit.findings import Finding
from freezekit._audit.report import AuditReport
from freezekit._audit.running import check_codes, check_doc, run_checks
from freezekit._audit.tree import module_rows
from freezekit._collector import collector_paused
from freezekit._inventory import take_inventory
from freezekit.errors import OptimizerError

__all__ = ["Optimizers", "audit", "check_optimizers", "make_context", "make_report"]

Optimizers = Optimizer | Sequence[Optimizer] | None


def audit(
    model: nn.Module,
    *,
    optimizer: Optimizers = None,
    expect_trainable: ExpectedTrainable | None = None,
    checks: Iterable[Check] = DEFAULT_CHECKS,
    ignore: Iterable[str] = (),
    inputs: Any = None,
) -> AuditReport:
    """Tell what learns in ``model``, what does not, and what is wrong.

    >>> from torch import nn
    >>> model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    >>> for module in model[:2]:
    ...     _ = module.requires_grad_(False)
    >>> report = audit(model)
    >>> report.trainable, report.frozen, [finding.code for finding in report.findings]
    (10, 28, ['FK201'])

    The model is looked at, never run and never changed. In a test or in CI, write
    ``audit(model, expect_trainable="head").raise_for("error")``.

    Args:
        model: any ``nn.Module``, frozen by whatever means, on any device.
        optimizer: the optimizer that trains it, or several: also checks that groups and state are
            in
            step with the model, by identity.
        expect_trainable: what is meant to be trainable: patterns as for :func:`freezekit.freeze`,
            or
            what :func:`freezekit.freeze_state` returned before. Anything else is an error (FK102).
        checks: the checks to run; your own are added as ``(*DEFAULT_CHECKS, mine)``. Each is a
            function of an :class:`AuditContext` that yields :class:`Finding` values.
        ignore: codes of findings to leave out, such as ``("FK203",)``.
        inputs: what the model's forward gets, as for :func:`freezekit.estimate_memory`; only shapes
            count. Findings about memory then say how much (FK703): that takes a trace or two on
            fake tensors, some seconds instead of milliseconds.

    Returns:
        The module tree, folded to what differs; totals in elements and bytes, each memory
        counted once; tied parameters; findings, the worst first.

    Raises:
        UnsupportedModelError: not a module, or a ScriptModule.
        OptimizerError: ``optimizer`` is none.
        PatternError, UnmatchedPatternError, FreezeStateError: ``expect_trainable`` is malformed, or
            names what is not there.
        TypeError: a check is not callable.
        ValueError: ``ignore`` names a code that no check has; there is no tensor in ``inputs``.
    """
    checks = tuple(checks)
    ignored = check_codes(checks, ignore)
    if inputs is not None:
        from freezekit._memory.estimate import check_inputs  # 0.1 s: for those who ask

        check_inputs(inputs)

    def look() -> AuditReport:
        context = make_context(model, optimizer, expect_trainable, inputs)
        return make_report(context, run_checks(context, checks, ignored), checks)

    # A function of its own: its records are gone before the collector could walk them.
    with collector_paused():
        return look()


def make_context(
    model: nn.Module,
    optimizer: Optimizers,
    expect_trainable: ExpectedTrainable | None,
    inputs: Any = None,
) -> AuditContext:
    """The context of a static audit; see :func:`audit` for what is raised."""
    optimizers = check_optimizers(optimizer)
    inventory = take_inventory(model)
    expected = None
    if expect_trainable is not None:
        expected = resolve_expectation(inventory, expect_trainable)
    return AuditContext(model, inventory, optimizers, expected, inputs=inputs)


def check_optimizers(optimizer: object) -> tuple[Optimizer, ...]:
    """The optimizers as a tuple.

    Raises:
        OptimizerError: something is none.
    """
    if optimizer is None:
        return ()
    several = isinstance(optimizer, Sequence)
    found = tuple(optimizer) if isinstance(optimizer, Sequence) else (optimizer,)
    for item in found:
        groups = getattr(item, "param_groups", None)
        if isinstance(item, Optimizer) or (
            isinstance(groups, list) and isinstance(getattr(item, "state", None), Mapping)
        ):
            continue
        kind = item.__name__ if inspect.isclass(item) else type(item).__name__
        inner = getattr(item, "optimizer", None)
        hint = "; its attribute .optimizer is one: pass that" if _is_optimizer(inner) else ""
        hint = hint or ("; make an instance of it" if inspect.isclass(item) else "")
        where = "one of several: " if several else ""
        raise OptimizerError(
            f"optimizer: {where}expected a torch.optim.Optimizer, got {kind}{hint}"
        )
    return found


def _is_optimizer(value: object) -> bool:
    return isinstance(value, Optimizer)


def make_report(
    context: AuditContext, findings: tuple[Finding, ...], checks: Iterable[Check]
) -> AuditReport:
    """The report of a model and of what was found."""
    found = {finding.code for finding in findings}
    docs = [doc for check in checks if (doc := check_doc(check)) and doc.code in found]
    inventory = context.inventory
    parameters = inventory.parameters
    return AuditReport(
        model=inventory.modules[0].type_name,
        rows=module_rows(inventory),
        findings=findings,
        tied=tuple((info.fqn, *info.aliases) for info in parameters if info.aliases),
        tensors=len(parameters),
        trainable_tensors=sum(info.requires_grad for info in parameters),
        trainable=sum(info.numel for info in parameters if info.requires_grad),
        frozen=sum(info.numel for info in parameters if not info.requires_grad),
        parameter_bytes=sum(info.nbytes for info in parameters),
        trainable_bytes=sum(info.nbytes for info in parameters if info.requires_grad),
        buffer_bytes=sum(info.nbytes for info in inventory.buffers),
        uninitialized=tuple(info.fqn for info in parameters if info.layout == "lazy"),
        sharded=sum(info.layout == "sharded" for info in parameters),
        packed=sum(info.layout == "packed" for info in parameters),
        docs=tuple((doc.code, doc) for doc in docs),
        step=context.step.summary() if context.step is not None else None,
    )
