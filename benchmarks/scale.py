"""What many devices cost: the shares of one global batch. Prints JSON.

python -m benchmarks.scale
"""

from __future__ import annotations

import json
import random
import time

from oomrun.core.shares import Replica, Speed, share_out

DEVICES = 10_000
BATCH = 1_000_000
REPEATS = 5


def replicas(kinds: int) -> list[Replica]:
    """So many devices of each of ``kinds`` kinds, in no order, none like another."""
    chance = random.Random(5)
    made = [
        Replica(
            chance.randint(1, 512),
            Speed(pass_s=chance.uniform(0, 0.2), sample_s=chance.uniform(1e-4, 1e-2)),
        )
        for _ in range(kinds)
    ]
    found = (made * -(-DEVICES // kinds))[:DEVICES]
    chance.shuffle(found)
    return found


def measured(devices: list[Replica]) -> dict[str, float]:
    """Of some plans the one that took longest; CPU time is ours alone."""
    wall, cpu = [], []
    for _ in range(REPEATS):
        began, began_cpu = time.perf_counter(), time.process_time()
        shares = share_out(BATCH, devices)
        cpu.append(time.process_time() - began_cpu)
        wall.append(time.perf_counter() - began)
        assert sum(part.share for part in shares.parts) == BATCH
    return {"wall_s": max(wall), "cpu_s": max(cpu)}


def main() -> None:
    """Prints what was measured."""
    various = replicas(DEVICES)
    report = {
        "devices": DEVICES,
        "global_batch_size": BATCH,
        "longest": {
            "all alike": measured(replicas(1)),
            "8 kinds": measured(replicas(8)),
            "no two alike": measured(various),
            "no speed measured": measured(
                [Replica(replica.micro_batch_max) for replica in various]
            ),
        },
    }
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
