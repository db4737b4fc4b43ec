"""A machine with GPUs for the tests: ``nvml/fake_nvml.c`` built and described.

The real pynvml loads it, because ``environment`` puts it first on LD_LIBRARY_PATH; the
loader reads that when a process starts, so tests run what they test in a subprocess.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

SOURCE = Path(__file__).parent / "nvml" / "fake_nvml.c"
GIB = 1 << 30
RESERVED_BYTES = 600 << 20


def functions() -> tuple[str, ...]:
    """The NVML functions that the library has and that can be told to fail."""
    return tuple(re.findall(r"^int (nvml\w+)\(", SOURCE.read_text(), re.MULTILINE))


def build(directory: Path, without: Sequence[str] = ()) -> Path:
    """Compiles the library into a directory, and returns the directory.

    Args:
        directory: where; it is made.
        without: functions that the library does not have, like one of an older driver.
    """
    directory.mkdir(parents=True, exist_ok=True)
    target = directory / "libnvidia-ml.so.1"
    command = ["cc", "-std=c11", "-D_GNU_SOURCE", "-O1", "-Wall", "-Wextra", "-Werror"]
    if without:
        symbols = directory / "symbols.map"
        symbols.write_text(f"{{ local: {'; '.join(without)}; }};")
        command.append(f"-Wl,--version-script={symbols}")
    subprocess.run(
        [*command, "-shared", "-fPIC", "-o", str(target), str(SOURCE)], check=True
    )
    return directory


def uuid(gpu: int) -> str:
    """The UUID of a GPU of the machine; the eighth digit tells the GPUs apart."""
    return f"GPU-0000000{gpu}-1111-2222-3333-444455556666"


def mig_uuid(gpu: int, mig: int) -> str:
    """The UUID of a MIG device of the machine."""
    return f"MIG-{gpu}{mig}000000-aaaa-bbbb-cccc-ddddeeeeffff"


class Machine:
    """The description that the library reads at every call.

    Every change replaces the file in one step, so that a call sees the old or the new.
    """

    def __init__(self, library: Path, description: Path, gpus: int = 8) -> None:
        self._library = library
        self._description = description
        self._facts: dict[str, str] = {"driver": "555.42.02", "gpus": str(gpus)}
        for gpu in range(gpus):
            self._add_gpu(gpu)
        self.change()

    def _add_gpu(self, gpu: int) -> None:
        self._facts.update(
            {
                f"{gpu}.uuid": uuid(gpu),
                f"{gpu}.name": "NVIDIA H100 80GB HBM3",
                f"{gpu}.bus": f"00000000:{gpu + 1:02X}:00.0",
                f"{gpu}.capability": "9.0",
                f"{gpu}.total": str(80 * GIB),
                f"{gpu}.reserved": str(RESERVED_BYTES),
                f"{gpu}.mig_mode": "0",
            }
        )

    def add_mig(self, gpu: int, count: int, total_bytes: int = 10 * GIB) -> None:
        """Turns MIG mode on, with ``count`` devices."""
        facts = {f"{gpu}.mig_mode": "1", f"{gpu}.migs": f"{count}"}
        for mig in range(count):
            facts |= {
                f"{gpu}.mig.{mig}.uuid": mig_uuid(gpu, mig),
                f"{gpu}.mig.{mig}.name": "NVIDIA H100 80GB HBM3 MIG 1g.10gb",
                f"{gpu}.mig.{mig}.total": str(total_bytes),
                f"{gpu}.mig.{mig}.instance": str(mig + 7),
                f"{gpu}.mig.{mig}.compute": "0",
            }
        self.change(facts)

    def change(self, facts: Mapping[str, str | int | None] | None = None) -> None:
        """Sets facts, or with None as value takes them away."""
        for key, value in (facts or {}).items():
            if value is None:
                self._facts.pop(key, None)
            else:
                self._facts[key] = str(value)
        new = self._description.with_suffix(".new")
        new.write_text("".join(f"{k} {v}\n" for k, v in self._facts.items()))
        new.replace(self._description)

    def environment(self, **more: str) -> dict[str, str]:
        """The environment of a process on this machine."""
        kept = {k: v for k, v in os.environ.items() if not k.startswith("CUDA_")}
        return {
            **kept,
            "LD_LIBRARY_PATH": str(self._library),
            "OOMRUN_FAKE_NVML": str(self._description),
            **more,
        }
