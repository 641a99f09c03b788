"""Outputs of layers inside a backbone, and a forward pass that ends after the last one wanted."""

from __future__ import annotations

import difflib
import threading
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from freezekit._features.trees import detach, map_tensors
from freezekit._inventory import Inventory, take_inventory
from freezekit._suggestions import suggest_names
from freezekit.errors import LayerNotRunError, UnknownLayerError

__all__ = ["Taps", "find_layers", "may_end_early", "run_taps"]


def find_layers(backbone: nn.Module, names: Sequence[str]) -> dict[str, str]:
    """For these FQNs the names as ``get_submodule`` takes them.

    Wrappers are looked through; of a wrapper and what it wraps, the wrapper is taken.

    Raises:
        UnknownLayerError: names that do not exist, all of them, with near ones.
    """
    inventory = take_inventory(backbone)
    known: dict[str, str] = {}
    for info in inventory.modules:
        known.setdefault(info.fqn, info.raw)
    for info in inventory.modules:
        known.setdefault(info.raw, info.raw)
    unknown = [name for name in names if name not in known or not name]
    if unknown:
        raise UnknownLayerError(unknown, [_near(name, known, inventory) for name in unknown])
    return {name: known[name] for name in names}


def _near(name: str, known: dict[str, str], inventory: Inventory) -> list[str]:
    near = [n for n in suggest_names(name, inventory, known.__contains__) if n in known]
    near += difflib.get_close_matches(name, [n for n in known if n], n=3)
    return list(dict.fromkeys(near))[:3]


class _LastLayerRan(BaseException):
    """Ends a forward pass; no Exception, so that no ``except`` in a model takes it for its own."""


class Taps:
    """Takes the outputs of layers while their backbone runs.

    How often each layer runs in one pass is counted in a first, whole pass: a layer that is used
    several times (ALBERT's) gives its last output, as it would without an early end.
    """

    def __init__(self, backbone: nn.Module, names: Sequence[str]) -> None:
        self.names = tuple(names)
        self.paths = find_layers(backbone, self.names)
        self.runs: dict[str, int] = {}

    def modules(self, backbone: nn.Module) -> dict[str, nn.Module]:
        """The layers as they are now: one may have been replaced, or the backbone wrapped."""
        try:
            return {name: backbone.get_submodule(path) for name, path in self.paths.items()}
        except AttributeError:
            self.paths = find_layers(backbone, self.names)
        return {name: backbone.get_submodule(path) for name, path in self.paths.items()}

    def run(
        self, backbone: nn.Module, call: Callable[[], object], *, whole: bool = False
    ) -> dict[str, Any]:
        """Run ``call`` and return each layer's last output, by name, in the order asked for.

        With ``whole`` the pass goes on to its end.

        Raises:
            UnknownLayerError: a layer is no longer there.
            LayerNotRunError: a layer did not run.
        """
        layers = self.modules(backbone)
        early = bool(self.runs) and not whole and may_end_early(backbone)
        caught = _Caught(dict(self.runs) if early else {})
        # On the modules for the length of the call only: used on its own, the backbone is bare.
        handles = [
            module.register_forward_hook(caught.hook(name)) for name, module in layers.items()
        ]
        try:
            call()
        except _LastLayerRan:
            pass
        finally:
            for handle in handles:
                handle.remove()
        missing = [name for name in self.names if name not in caught.outputs]
        if missing:
            raise LayerNotRunError(missing, _why_not_run(layers, missing))
        if not early:
            self.runs = caught.counts
        return {name: caught.outputs[name] for name in self.names}


# Hooks that come and go cannot be traced; what is in the layers can. The public
# torch.compiler.disable imports the whole compiler, this one waits until it is there.
@torch._disable_dynamo  # type: ignore[attr-defined]
def run_taps(taps: Taps, backbone: nn.Module, args: Any, kwargs: Any) -> dict[str, Any]:
    """``taps.run`` for a call of the backbone, also inside of compiled code."""
    return taps.run(backbone, lambda: backbone(*args, **kwargs))


class _Caught:
    """What one call has caught so far. Other threads may run the same modules meanwhile."""

    def __init__(self, left: dict[str, int]) -> None:
        self.thread = threading.get_ident()
        self.left = left
        self.outputs: dict[str, Any] = {}
        self.counts: dict[str, int] = {}

    def hook(self, name: str) -> Callable[[nn.Module, Any, Any], None]:
        def take(_module: nn.Module, _args: Any, output: Any) -> None:
            if threading.get_ident() != self.thread:
                return
            self.counts[name] = self.counts.get(name, 0) + 1
            if name in self.left:
                self.left[name] -= 1
                if self.left[name] <= 0:
                    del self.left[name]
                if not self.left:
                    self.outputs[name] = detach(output)
                    raise _LastLayerRan
            # A copy: what comes after may work in place, as ReLU(inplace=True) does.
            self.outputs[name] = map_tensors(output, _copy)

        return take


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().clone()


def may_end_early(backbone: nn.Module) -> bool:
    """Whether nothing is left undone when a forward pass of ``backbone`` ends in its middle.

    FSDP gathers weights before a forward and lets go of them after it; accelerate's hooks move
    them to the device and back.
    """
    return not any(
        "_hf_hook" in module.__dict__ or _cleans_up(type(module).__mro__)
        for module in backbone.modules()
    )


@lru_cache(maxsize=4096)
def _cleans_up(classes: tuple[type, ...]) -> bool:
    names = {cls.__name__ for cls in classes}
    return not names.isdisjoint({"FSDPModule", "FullyShardedDataParallel", "DeepSpeedEngine"})


def _why_not_run(layers: dict[str, nn.Module], missing: Sequence[str]) -> str:
    for name in missing:
        module = layers[name]
        if isinstance(module, nn.ModuleList | nn.ModuleDict):
            children = [f"{name}.{child}" for child, _ in module.named_children()]
            if children:
                return f"{name!r} only holds others and never runs itself: take {children[-1]!r}"
    return (
        "this input does not reach them, or the backbone calls what is in them without calling "
        "them, or it was compiled (compile the extractor instead)"
    )
