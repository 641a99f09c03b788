"""Why a trainable parameter received no gradient: read from the calls that were seen."""

from __future__ import annotations

from collections import defaultdict
from typing import Literal, NamedTuple, TypeAlias

from torch import nn

from freezekit import _wrappers
from freezekit._audit.context import AuditContext
from freezekit._audit.step.record import Call, StepRecord

__all__ = ["Cause", "Kind", "causes_of_missing"]

Kind: TypeAlias = Literal[
    "no_grad",
    "inference",
    "checkpoint",
    "cut_inside",
    "cut_between",
    "not_called",
    "not_used",
    "not_reached",
    "autocast",
    "compiled",
]


class Cause(NamedTuple):
    """Why gradients are missing.

    Attributes:
        kind: what is in their way.
        module: index of the module that is named; -1 for none.
        other: index of the module on the other side of a cut; -1 for none.
    """

    kind: Kind
    module: int
    other: int = -1


def causes_of_missing(context: AuditContext) -> dict[Cause, list[int]]:
    """The trainable parameters without a gradient, by cause, in model order."""
    record = context.step
    if record is None:
        return {}
    finder = _Finder(context, record)
    found: dict[Cause, list[int]] = defaultdict(list)
    for index, info in enumerate(context.inventory.parameters):
        if info.requires_grad and index not in record.gradients:
            found[finder.cause(index)].append(index)
    return dict(found)


class _Finder:
    def __init__(self, context: AuditContext, record: StepRecord) -> None:
        self.context = context
        self.record = record
        self.calls: dict[int, list[Call]] = defaultdict(list)
        self.inner: dict[Call, list[Call]] = defaultdict(list)
        for call in record.calls:
            self.calls[call.module].append(call)
            if call.parent is not None:
                self.inner[call.parent].append(call)
        self.owners: dict[int, list[int]] = defaultdict(list)
        for module in range(len(context.inventory.modules)):
            for i in context.own_entries(module):
                self.owners[context.inventory.entries[i].parameter].append(module)

    def cause(self, parameter: int) -> Cause:
        """Why this parameter received no gradient."""
        places = [self.place(owner) for owner in self.owners[parameter]]
        called = [(module, calls, own) for module, calls, own in places if calls]
        if not called:
            owner = self.owners[parameter][0]
            compiled = self.compiled_around(owner)
            if compiled >= 0:
                return Cause("compiled", compiled)
            return Cause("not_called", self.outermost_uncalled(owner))
        module, calls, own = called[0]
        recording = [call for call in calls if call.grad]
        if not recording:
            return self.switched_off(calls)
        if not own and self.compiled_around(self.owners[parameter][0]) < 0:
            return self.of_uncalled(self.owners[parameter][0], module, recording)
        return self.of_recording(module, calls, recording)

    def place(self, owner: int) -> tuple[int, list[Call], bool]:
        """The nearest called module at or around ``owner``, and whether it is ``owner``."""
        modules = self.context.inventory.modules
        index = owner
        while index >= 0:
            first = modules[index].repeats if modules[index].repeats >= 0 else index
            if self.calls.get(first):
                return first, self.calls[first], index == owner
            index = modules[index].parent
        return owner, [], True

    def outermost_uncalled(self, owner: int) -> int:
        """The outermost part around ``owner`` of which nothing was called."""
        modules = self.context.inventory.modules
        index = owner
        while modules[index].parent >= 0:
            parent = modules[index].parent
            below = range(parent, modules[parent].end)
            if any(self.calls.get(i) for i in below):
                break
            index = parent
        return index

    def compiled_around(self, owner: int) -> int:
        """The compiled module that ``owner`` lies in, which was not looked into; -1 for none."""
        modules = self.context.inventory.modules
        index = modules[owner].parent
        while index >= 0:
            if _wrappers.is_compiled(self.context.inventory.module(index)):
                return index
            index = modules[index].parent
        return -1

    def switched_off(self, calls: list[Call]) -> Cause:
        """All calls ran with gradients off: by what, and around which module."""
        call = calls[0]
        if call.inference:
            return Cause("inference", call.boundary.module)
        if any(call.reentrant for call in calls):
            return Cause("checkpoint", call.boundary.module)
        boundary = call.boundary
        around = boundary.parent
        # A forward that is decorated with no_grad switches off around all that it calls.
        if around is not None and not around.output_requires and not self.records_in(around):
            boundary = around
        return Cause("no_grad", boundary.module)

    def records_in(self, call: Call) -> bool:
        """Whether something that was called from within this call recorded gradients."""
        return any(inner.grad for inner in self.inner.get(call, ()))

    def of_uncalled(self, owner: int, module: int, recording: list[Call]) -> Cause:
        """The owner was not called, but something around it was.

        Either nothing uses it, or what is around it computes with its parameters itself
        (``MultiheadAttention`` and its output projection): then that one's calls tell.
        """
        outermost = self.outermost_uncalled(owner)
        if any(call.grad_arrived for call in recording) or module == 0:
            listed = isinstance(
                self.context.inventory.module(owner), nn.ParameterList | nn.ParameterDict
            )
            # What has no forward is not called, but used by the module around it.
            return Cause("not_used", module) if listed else Cause("not_called", outermost)
        return self.of_recording(module, recording, recording)

    def of_recording(self, module: int, calls: list[Call], recording: list[Call]) -> Cause:
        """Calls that recorded gradients, of which none came back to the parameter."""
        if any(call.grad_arrived for call in recording):
            if not all(call.grad for call in calls) and any(call.autocast for call in recording):
                return Cause("autocast", module)
            return Cause("not_used", module)
        if not any(call.output_requires for call in recording):
            inner = [call for outer in recording for call in self.inner.get(outer, ())]
            if inner and not any(call.grad for call in inner):
                return Cause("no_grad", module)
            if any(call.autocast for call in recording) and any(not call.grad for call in calls):
                return Cause("autocast", module)
            return Cause("cut_inside", module)
        return self.cut_after(module, recording)

    def cut_after(self, module: int, recording: list[Call]) -> Cause:
        """Its output required a gradient, and none came: where the way to the loss is cut."""
        for call in recording:
            unreached = call
            while True:
                parent, into = unreached.parent, unreached.detached_into
                ends_here = parent is not None and parent.grad and not parent.output_requires
                if into is not None and not (ends_here and into.parent is not parent):
                    return Cause("cut_between", unreached.module, into.module)
                if parent is None or parent.grad_arrived:
                    break
                if ends_here:
                    return Cause("cut_inside", parent.module)
                unreached = parent
            cut = self.next_cut(unreached)
            if cut is not None:
                return cut
            return Cause("not_reached", unreached.module)
        return Cause("not_reached", module)

    def next_cut(self, call: Call) -> Cause | None:
        """The first cut among the calls that come after this one, at its level."""
        last = call
        for later in self.record.calls[call.order + 1 :]:
            if later.parent is not call.parent:
                continue
            if later.detached_into is not None and not later.grad_arrived:
                return Cause("cut_between", later.module, later.detached_into.module)
            # Side by side in the step's own code, data may come from anywhere: widths have to fit.
            fits = call.parent is not None or later.input_width == last.output_width
            if later.cut_inputs and later.grad and fits:
                return Cause("cut_between", last.module, later.module)
            if later.grad_arrived or not later.inputs_require:
                return None
            if not later.output_requires:
                return Cause("cut_inside", later.module)
            last = later
        return None
