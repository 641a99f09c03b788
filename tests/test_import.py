"""Importing freezekit brings in torch and nothing heavier; the package says what it has."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

import freezekit

# What a light import must not bring in: heavy, slow, or only used in some corner.
HEAVY = (
    "transformers",
    "peft",
    "rich",
    "safetensors",
    "matplotlib",
    "lightning",
    "torchvision",
    "pandas",
    "IPython",
    "pytest",
    "torch._dynamo",
    "torch._inductor",
    "torch.distributed.fsdp",
)

# Stages of one fresh interpreter: each prints what it imported beyond those before it.
STAGES = {
    "import": "import freezekit",
    "work": """
        model = torch.nn.Linear(1, 1)
        with freezekit.frozen(model):
            pass
        str(freezekit.freeze(model, "bias")), str(freezekit.audit(model))
        str(freezekit.select(model)), freezekit.audit(model).to_dict()
        freezekit.load_freeze_state(model, freezekit.freeze_state(model))
    """,
    "rich": "import rich",
}


@pytest.fixture(scope="module")
def imported() -> dict[str, set[str]]:
    """What each stage imports, torch itself aside."""
    parts = ["import sys, torch", "seen = set(sys.modules)"]
    for code in STAGES.values():
        parts += [
            textwrap.dedent(code).strip(),
            "print(*sorted(set(sys.modules) - seen))",
            "seen = set(sys.modules)",
        ]
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(parts)],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    lines = done.stdout.split("\n")[: len(STAGES)]
    return {stage: set(line.split()) for stage, line in zip(STAGES, lines, strict=True)}


def is_of(module: str, package: str) -> bool:
    """Whether a module belongs to a package."""
    return module == package or module.startswith(f"{package}.")


def heavy_in(modules: set[str]) -> list[str]:
    """What of the modules is heavy."""
    return sorted(m for m in modules if any(is_of(m, package) for package in HEAVY))


@pytest.mark.parametrize("stage", ["import", "work"])
def test_nothing_heavy_comes_in(stage: str, imported: dict[str, set[str]]) -> None:
    """Neither the import nor freezing, auditing and printing bring in a heavy package."""
    assert heavy_in(imported[stage]) == []


def test_import_brings_in_the_package_and_the_standard_library_alone(
    imported: dict[str, set[str]],
) -> None:
    """All that comes in is freezekit's own or Python's."""
    packages = {module.partition(".")[0] for module in imported["import"]}
    assert packages - set(sys.stdlib_module_names) == {"freezekit"}


def test_the_check_can_fail(imported: dict[str, set[str]]) -> None:
    """The same check, in the same interpreter, finds a heavy package once it is imported."""
    assert "rich" in heavy_in(imported["rich"])


# -- what the package has ----------------------------------------------------------------------


def test_the_public_names_are_there() -> None:
    """Every name of ``__all__`` exists, sorted, and dir() shows just these."""
    assert all(hasattr(freezekit, name) for name in freezekit.__all__)
    constants_first = sorted(freezekit.__all__, key=lambda name: (not name.isupper(), name))
    assert constants_first == freezekit.__all__
    assert dir(freezekit) == sorted(freezekit.__all__)


@pytest.mark.parametrize(
    "name", [n for n in freezekit.__all__ if not n.startswith("__") and not n.isupper()]
)
def test_every_public_name_is_documented(name: str) -> None:
    """Functions and classes have docstrings; functions are those of the package."""
    thing = getattr(freezekit, name)
    if name != "FreezeState":  # a TypedDict's docstring counts as well
        assert thing.__module__.startswith("freezekit.")
    assert len(thing.__doc__) > 40


def test_the_version_is_a_version() -> None:
    """The version reads like one."""
    from packaging.version import Version

    assert str(Version(freezekit.__version__)) == freezekit.__version__


def test_errors_come_with_the_package() -> None:
    """``import freezekit`` is enough to write ``freezekit.errors.PatternError``."""
    assert freezekit.errors.PatternError.__name__ == "PatternError"


def test_the_package_is_typed() -> None:
    """The marker that type checkers look for is beside the package."""
    from importlib.resources import files

    assert (files("freezekit") / "py.typed").is_file()
