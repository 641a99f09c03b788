"""What no CPU can settle, in one command on one GPU: at most 8 minutes, the most valuable first.

    python benchmarks/gpu_session.py [--out DIR] [--minutes 8]
    python benchmarks/gpu_session.py --dry-run [--only TEXT]

Runs from a clone, with torch and transformers and nothing installed. After every configuration one
JSON line is appended to ``DIR/records.jsonl``; what an earlier file has is not run again. Without a
GPU ``--dry-run`` goes through every configuration on the CPU at reduced size, and estimates it at
full size.
"""

from __future__ import annotations

import argparse
import gzip
import json
import sys
import time
from pathlib import Path
from typing import Any

BENCHMARKS = Path(__file__).resolve().parent
sys.path[:0] = [str(BENCHMARKS.parent / "src"), str(BENCHMARKS)]

import torch  # noqa: E402

import freezekit  # noqa: E402
from _gpu_session.build import build  # noqa: E402
from _gpu_session.configs import CONFIGS, Config  # noqa: E402
from _gpu_session.records import append, keys_done, new_record  # noqa: E402
from _gpu_session.run import CpuDevice, Device, run  # noqa: E402

RESULTS = BENCHMARKS / "results" / "h200"
# Left before the end for a configuration to be begun at all, seconds.
RESERVE = 20


def estimate(config: Config, *, small: bool = False) -> dict[str, Any]:
    """What is predicted for a configuration, in bytes."""
    setup = build(config, "meta", small=small)
    found = freezekit.estimate_memory(
        setup.model,
        setup.inputs,
        loss=setup.loss,
        optimizer=config.optimizer,
        autocast=torch.bfloat16 if config.precision == "autocast" else None,
        device="NVIDIA H200",
        steps=3,
    )
    return {
        "allocated": found.peak_allocated,
        "reserved": found.peak_reserved,
        "safe": found.safe,
        "fits_cap": not config.cap or not found.lacks(config.cap),
    }


def session(
    device: Device,
    path: Path,
    configs: tuple[Config, ...],
    *,
    end: float,
    dry_run: bool,
    small_estimates: bool = False,
) -> int:
    """Run what is not done yet until the time is over; returns how many are left."""
    done = keys_done(path)
    waiting = [config for config in configs if config.key not in done]
    for number, config in enumerate(waiting):
        left = end - time.monotonic()
        if left < RESERVE:
            print(f"time is over: {len(waiting) - number} configurations are left", flush=True)
            return len(waiting) - number
        record = new_record(config, dry_run=dry_run, device=device.name)
        found, events = run(config, device, small=dry_run)
        record |= found
        if dry_run and config.part != "time":
            record["predicted"] = estimate(config, small=small_estimates)
        if events is not None:
            record["events"] = _write_events(path.parent, config, events)
        append(path, record)
        print(f"[{left:4.0f} s left] {config.key}: {_summary(record)}", flush=True)
    print(f"all {len(configs)} configurations are in {path}", flush=True)
    return 0


def _write_events(folder: Path, config: Config, events: dict[str, Any]) -> str:
    name = config.key.replace("/", "_") + ".json.gz"
    beside = folder / f".{name}"
    with gzip.open(beside, "wt", encoding="utf-8") as file:
        json.dump({"workload": config.key, **events}, file)
    beside.replace(folder / name)
    return name


def _summary(record: dict[str, Any]) -> str:
    if record["outcome"] != "ran":
        return f"{record['outcome']}: {record['error']}"
    reserved = record.get("max_reserved")
    measured = "" if reserved is None else f"{reserved / 2**20:,.0f} MiB reserved"
    predicted = record.get("predicted")
    told = "" if predicted is None else f"{predicted['reserved'] / 2**20:,.0f} MiB predicted"
    return ", ".join(text for text in ("ran", measured, told) if text)


def main(arguments: list[str] | None = None) -> int:
    """Run a session; 0 if everything is done, 3 if something is left."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the records")
    parser.add_argument("--minutes", type=float, default=8.0, help="when to stop")
    parser.add_argument("--dry-run", action="store_true", help="on the CPU, at reduced size")
    parser.add_argument("--only", default="", help="configurations whose name has this in it")
    options = parser.parse_args(arguments)
    begun = time.monotonic()
    configs = tuple(config for config in CONFIGS if options.only in config.key)
    if not configs:
        parser.error(f"no configuration has {options.only!r} in its name, such as {CONFIGS[0].key}")
    device: Device
    if options.dry_run:
        device, name, end = CpuDevice(), "dry.jsonl", float("inf")
    elif torch.cuda.is_available():
        from _gpu_session.cuda import CudaDevice

        device, name, end = CudaDevice(), "records.jsonl", begun + 60 * options.minutes
    else:
        parser.error("torch sees no GPU; --dry-run needs none")
    left = session(device, options.out / name, configs, end=end, dry_run=options.dry_run)
    return 3 if left else 0


if __name__ == "__main__":
    sys.exit(main())
