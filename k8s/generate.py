"""Writes ``k8s/base``: the quickstart as ``oomrun render`` prints it.

``python k8s/generate.py`` after a change; a test compares.
"""

from __future__ import annotations

import sys
from pathlib import Path

from oomrun.cli import main

HERE = Path(__file__).parent
JOB = HERE.parent / "configs" / "quickstart" / "job.yaml"
SECTION = "kubernetes={image: oomrun:0.1.0, cpu: 2, memory: 4GiB, volume: {size: 1GiB}}"


def generate(folder: Path) -> int:
    """Renders the base into the folder; the exit code of ``oomrun render``."""
    return main(["render", str(JOB), "--set", SECTION, "--output", str(folder)])


if __name__ == "__main__":
    sys.exit(generate(HERE / "base"))
