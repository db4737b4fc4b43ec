"""A second run of a job on several devices tries no size again."""

from __future__ import annotations

from pathlib import Path

import jobs
import pytest
import wide_model

from oomrun.core import events as ev

SCRIPT = (
    wide_model.START.replace("16384", "int(os.environ.get('WIDTH', 16384))")
    + "model.fit(x, y, batch_size=96, epochs=1, verbose=0)\n"
)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["horovod", "mirrored"])
def test_what_one_run_has_tried_the_next_one_knows(
    tmp_path: Path, strategy: str
) -> None:
    limits = "[60MiB, 30MiB]" if strategy == "horovod" else "[30MiB, 30MiB]"
    more = f"strategy: {strategy}\ndevices: {{cpu: 2, memory: {limits}}}\n"
    run = jobs.make(tmp_path, SCRIPT, more)

    def tried(*options: str, **env: str) -> tuple[set[int], list[tuple[int, int]]]:
        """The workers that tried sizes, and what each device came to do."""
        assert run.run("--fresh", *options, env=env) == 0, run.everything()
        ranks = {event.rank for event in run.events(ev.SizesTried)}
        probed = {0 for _ in run.events(ev.Probed)}  # told of the first worker
        shares = run.events(ev.SharePlanned)
        return ranks | probed, sorted((s.rank, s.micro_batch_size) for s in shares)

    workers = {0, 1} if strategy == "horovod" else {0}
    first, planned = tried()
    assert first == workers, run.everything()
    assert tried() == (set(), planned), run.everything()
    # Another model is another key, and so is another number of devices.
    assert tried(WIDTH="15000")[0] == workers
    three = f"devices.memory={limits[:-1]}, 30MiB]"
    assert 0 in tried("--set", "devices.cpu=3", "--set", three)[0]
