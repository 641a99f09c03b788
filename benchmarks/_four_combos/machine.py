"""Where a run took place: processor, system and versions, and nothing that names its owner."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from pathlib import Path

import torch

import freezekit
from _four_combos.model import WEIGHTS_PACKAGE
from _four_combos.results import Machine


def describe() -> Machine:
    """Describe this machine."""
    return Machine(
        cpu=_cpu_model(),
        cores=_cores(),
        threads=torch.get_num_threads(),
        system=f"{_system()}, {platform.machine()}",
    )


def versions() -> dict[str, str]:
    """Return the versions of everything that the figures depend on."""
    packages = ("torch", "transformers", "tokenizers", WEIGHTS_PACKAGE)
    return {
        "python": platform.python_version(),
        "freezekit": freezekit.__version__,
        **{package: metadata.version(package) for package in packages},
    }


def _cores() -> int:
    # A container or a batch system may give this process fewer cores than the machine has.
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _cpu_model() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _system() -> str:
    try:
        return platform.freedesktop_os_release()["PRETTY_NAME"]
    except (OSError, KeyError):
        return f"{platform.system()} {platform.release()}"
