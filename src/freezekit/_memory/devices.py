"""Common GPUs: how much memory a process sees on them, and what they can do.

The memory is what ``torch.cuda.get_device_properties(...).total_memory`` reports, which is less
than the card's nominal size; in GiB to two decimals, as PyTorch's out-of-memory message prints it
("GPU 0 has a total capacity of 10.75 GiB"). It varies by some 100 MiB with driver and error
correction: where messages differ, the lower one is here.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass

from freezekit._memory.sizes import parse_size

__all__ = [
    "A100",
    "CONTEXT",
    "GPUS",
    "Capability",
    "Gpu",
    "Target",
    "budget_bytes",
    "find_gpu",
    "target_for",
]

MIB = 1 << 20
GIB = 1 << 30
Capability = tuple[int, int]

# Bytes of a CUDA context with the kernels that a training loads, least and most: 248 MiB were
# measured on an RTX 4060 before the first kernel, 300 to 600 MiB are reported for processes at work
# (lazy module loading, CUDA 11.7 and later).
CONTEXT = (250 * MIB, 600 * MIB)


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU's name, usable memory in bytes, compute capability, and count of multiprocessors."""

    name: str
    memory: int
    capability: Capability
    multiprocessors: int


def _gpu(name: str, gib: float, major: int, minor: int, multiprocessors: int) -> Gpu:
    return Gpu(name, int(gib * GIB), (major, minor), multiprocessors)


GPUS: tuple[Gpu, ...] = (
    _gpu("NVIDIA GeForce GTX 1060 6GB", 5.93, 6, 1, 10),
    _gpu("NVIDIA GeForce GTX 1070", 7.92, 6, 1, 15),
    _gpu("NVIDIA GeForce GTX 1080", 7.92, 6, 1, 20),
    _gpu("NVIDIA GeForce GTX 1080 Ti", 10.91, 6, 1, 28),
    _gpu("NVIDIA GeForce GTX 1650", 3.81, 7, 5, 14),
    _gpu("NVIDIA GeForce GTX 1660 Ti", 5.80, 7, 5, 24),
    _gpu("NVIDIA TITAN Xp", 11.91, 6, 1, 30),
    _gpu("NVIDIA TITAN V", 11.77, 7, 0, 80),
    _gpu("NVIDIA TITAN RTX", 23.65, 7, 5, 72),
    _gpu("NVIDIA GeForce RTX 2060", 5.80, 7, 5, 30),
    _gpu("NVIDIA GeForce RTX 2070", 7.79, 7, 5, 36),
    _gpu("NVIDIA GeForce RTX 2070 SUPER", 7.78, 7, 5, 40),
    _gpu("NVIDIA GeForce RTX 2080", 7.79, 7, 5, 46),
    _gpu("NVIDIA GeForce RTX 2080 SUPER", 7.79, 7, 5, 48),
    _gpu("NVIDIA GeForce RTX 2080 Ti", 10.75, 7, 5, 68),
    _gpu("NVIDIA GeForce RTX 3060", 11.75, 8, 6, 28),
    _gpu("NVIDIA GeForce RTX 3060 Ti", 7.78, 8, 6, 38),
    _gpu("NVIDIA GeForce RTX 3070", 7.78, 8, 6, 46),
    _gpu("NVIDIA GeForce RTX 3080", 9.77, 8, 6, 68),
    _gpu("NVIDIA GeForce RTX 3080 Ti", 11.76, 8, 6, 80),
    _gpu("NVIDIA GeForce RTX 3090", 23.68, 8, 6, 82),
    _gpu("NVIDIA GeForce RTX 3090 Ti", 23.68, 8, 6, 84),
    _gpu("NVIDIA GeForce RTX 4060", 7.74, 8, 9, 24),
    _gpu("NVIDIA GeForce RTX 4060 Ti 8GB", 7.61, 8, 9, 34),
    _gpu("NVIDIA GeForce RTX 4060 Ti 16GB", 15.59, 8, 9, 34),
    _gpu("NVIDIA GeForce RTX 4070", 11.72, 8, 9, 46),
    _gpu("NVIDIA GeForce RTX 4070 Ti", 11.72, 8, 9, 60),
    _gpu("NVIDIA GeForce RTX 4070 Ti SUPER", 15.69, 8, 9, 66),
    _gpu("NVIDIA GeForce RTX 4080", 15.70, 8, 9, 76),
    _gpu("NVIDIA GeForce RTX 4080 SUPER", 15.57, 8, 9, 80),
    _gpu("NVIDIA GeForce RTX 4090", 23.64, 8, 9, 128),
    _gpu("NVIDIA GeForce RTX 5060 Ti 16GB", 15.47, 12, 0, 36),
    _gpu("NVIDIA GeForce RTX 5070 Ti", 15.46, 12, 0, 70),
    _gpu("NVIDIA GeForce RTX 5080", 15.47, 12, 0, 84),
    _gpu("NVIDIA GeForce RTX 5090", 31.36, 12, 0, 170),
    _gpu("NVIDIA RTX A4000", 15.72, 8, 6, 48),
    _gpu("NVIDIA RTX A5000", 23.68, 8, 6, 64),
    _gpu("NVIDIA RTX A6000", 47.54, 8, 6, 84),
    _gpu("NVIDIA RTX 6000 Ada Generation", 44.43, 8, 9, 142),
    _gpu("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", 94.97, 12, 0, 188),
    _gpu("Quadro RTX 6000", 22.17, 7, 5, 72),
    _gpu("Quadro RTX 8000", 47.45, 7, 5, 72),
    _gpu("Tesla P100-PCIE-16GB", 15.89, 6, 0, 56),
    _gpu("Tesla T4", 14.56, 7, 5, 40),
    _gpu("Tesla V100-SXM2-16GB", 15.77, 7, 0, 80),
    _gpu("Tesla V100-SXM2-32GB", 31.73, 7, 0, 80),
    _gpu("NVIDIA A10", 21.99, 8, 6, 72),
    _gpu("NVIDIA A10G", 21.99, 8, 6, 80),
    _gpu("NVIDIA A30", 23.50, 8, 0, 56),
    _gpu("NVIDIA A40", 44.34, 8, 6, 84),
    _gpu("NVIDIA A100-PCIE-40GB", 39.38, 8, 0, 108),
    _gpu("NVIDIA A100-SXM4-40GB", 39.38, 8, 0, 108),
    _gpu("NVIDIA A100-SXM4-80GB", 79.15, 8, 0, 108),
    _gpu("NVIDIA A100 80GB PCIe", 79.15, 8, 0, 108),
    _gpu("NVIDIA L4", 21.95, 8, 9, 58),
    _gpu("NVIDIA L40", 44.31, 8, 9, 142),
    _gpu("NVIDIA L40S", 44.31, 8, 9, 142),
    _gpu("NVIDIA H100 PCIe", 79.10, 9, 0, 114),
    _gpu("NVIDIA H100 80GB HBM3", 79.10, 9, 0, 132),
    _gpu("NVIDIA H100 NVL", 93.00, 9, 0, 132),
    _gpu("NVIDIA GH200 480GB", 94.50, 9, 0, 132),
    _gpu("NVIDIA H200", 139.71, 9, 0, 132),
    _gpu("NVIDIA B200", 178.35, 10, 0, 148),
)


# Words of a name that people leave out.
_LEFT_OUT = frozenset({"nvidia", "geforce", "tesla", "generation", "edition"})
# Words that make another GPU of it.
_OTHER = frozenset({"ti", "super"})
_SERIES = frozenset({"rtx", "gtx", "titan"})


def _words(name: str) -> tuple[str, ...]:
    words = name.lower().replace("-", " ").replace("_", " ").split()
    return tuple(word for word in words if word not in _LEFT_OUT)


def find_gpu(name: str) -> Gpu:
    """``find_gpu("RTX 2080 Ti")``: by the full name, or by words that no other GPU's name has.

    Raises:
        ValueError: no such GPU, or several; their names, or the nearest ones, are given.
    """
    wanted = _words(name)
    whole = [gpu for gpu in GPUS if "".join(_words(gpu.name)) == "".join(wanted)]
    found = whole or [gpu for gpu in GPUS if wanted and _abbreviates(wanted, _words(gpu.name))]
    if len({(gpu.memory, gpu.capability, gpu.multiprocessors) for gpu in found}) == 1:
        return found[0]
    otherwise = "(or give its memory, such as '11GiB')"
    if found:
        names = ", ".join(gpu.name for gpu in found)
        raise ValueError(f"{name!r} may be any of {names}: which one {otherwise}")
    near = _near(wanted)
    hint = f"; near names: {', '.join(near)}" if near else ""
    raise ValueError(f"unknown GPU {name!r}{hint} {otherwise}")


def _abbreviates(wanted: tuple[str, ...], name: tuple[str, ...]) -> bool:
    left = set(name) - set(wanted)
    return set(wanted) <= set(name) and not left & _OTHER


def _near(wanted: tuple[str, ...]) -> list[str]:
    """Names that share words that few names have, or are spelled alike."""
    names = {" ".join(_words(gpu.name)): gpu.name for gpu in GPUS}
    telling = set(wanted) - _OTHER - _SERIES
    sharing = [name for plain, name in names.items() if telling & set(plain.split())]
    alike = difflib.get_close_matches(" ".join(wanted), names, n=3, cutoff=0.5)
    return sharing[:3] or [names[plain] for plain in alike]


@dataclass(frozen=True, slots=True)
class Target:
    """What a trace is made for.

    Attributes:
        capability: the GPU's compute capability.
        torch_version: major and minor version of the torch that will run.
        multiprocessors: the GPU's.
    """

    capability: Capability = (8, 0)
    torch_version: tuple[int, int] = (2, 13)
    multiprocessors: int = 108

    @property
    def threads(self) -> int:
        """How many threads it holds at once (CUDA programming guide, table of capabilities)."""
        if self.capability == (7, 5):
            return self.multiprocessors * 1024
        small = self.capability in ((8, 6), (8, 7), (8, 9)) or self.capability >= (12, 0)
        return self.multiprocessors * (1536 if small else 2048)


# What is estimated for where nothing is said.
A100 = Target()


def target_for(
    device: str, capability: Capability | None, torch_version: tuple[int, int]
) -> Target:
    """For a GPU's name, or for ``"cuda"`` the largest known one of the capability, or of 8.0.

    Raises:
        ValueError: no such GPU, or several; the nearest names are given.
    """
    if device != "cuda":
        gpu = find_gpu(device)
        return Target(capability or gpu.capability, torch_version, gpu.multiprocessors)
    capability = capability or (8, 0)
    counts = [gpu.multiprocessors for gpu in GPUS if gpu.capability == capability]
    return Target(capability, torch_version, max(counts, default=108))


def budget_bytes(budget: str | int) -> int:
    """The memory of a budget: a GPU's name, or a size such as ``"11GiB"``.

    Raises:
        ValueError: neither a size nor a known GPU.
    """
    if isinstance(budget, str) and any(c.isalpha() for c in budget.strip()[:1]):
        return find_gpu(budget).memory
    return parse_size(budget)
