"""The four combinations of ``torch.no_grad()`` and ``requires_grad``, measured.

Reproduces the table of a well-known question and says, with figures, where it is wrong: see
docs/explanation/four-combinations.md. Run it with ``nox -s four_combos``, which fetches the
weights and the text beforehand; nothing is fetched here.
"""

from __future__ import annotations

import os
import sys
import time

BEGUN = time.monotonic()
# Before torch and transformers are imported: no look-ups on a model hub, and none of the
# profiler's own lines between the tables.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("KINETO_LOG_LEVEL", "99")
# Threads that wait sleep instead of spinning: a step takes several times as long when another
# program wants the cores that they spin on.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from _four_combos.cli import main  # noqa: E402 - see above

if __name__ == "__main__":
    sys.exit(main(begun=BEGUN))
