"""The base of every report: a value that can be printed, shown in a notebook, and stored."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

import torch

from freezekit._tables import Section, render_html, render_rich, render_text

if TYPE_CHECKING:
    from rich.console import Group

__all__ = ["Report"]


class Report(ABC):
    """Base of freezekit's reports: frozen values of ints (bytes), FQN strings and tuples.

    ``print(report)`` is plain text of at most 100 columns; ``rich.print(report)`` and a notebook
    show the same content; :meth:`to_dict` is the machine's form, stable under its schema name.
    """

    __slots__ = ()

    @abstractmethod
    def _sections(self) -> tuple[Section, ...]: ...

    def __str__(self) -> str:
        return render_text(self._sections())

    def __rich__(self) -> Group:
        return render_rich(self._sections())

    def _repr_html_(self) -> str:
        return render_html(self._sections())

    def to_dict(self) -> dict[str, Any]:
        """Everything in the report as JSON-able values; sizes in bytes.

        The key ``"schema"`` names the layout, such as ``"freezekit.FreezeReport/1"``. Fields whose
        metadata says ``internal`` are left out.
        """
        return {"schema": f"freezekit.{type(self).__name__}/1", **_plain(self)}


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {
            f.name: _plain(getattr(value, f.name))
            for f in dataclasses.fields(value)
            if not f.metadata.get("internal")
        }
    if hasattr(value, "_asdict"):
        return {name: _plain(item) for name, item in value._asdict().items()}
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    return value
