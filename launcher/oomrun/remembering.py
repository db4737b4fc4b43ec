"""What runs learn of their models' memory, kept for later runs.

Covers: the supervisor's part: what it adds to a model's key, its answer to a worker
that begins a fit, storing what the run has measured. Does not cover: the files
(``profiles.py``) and what a profile says (``core/profile.py``).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import oomrun
from oomrun.core import events as ev
from oomrun.core.launch import REMEMBERED
from oomrun.core.plan import Plan
from oomrun.core.profile import Profile, relevant_variables
from oomrun.core.spec import IN_WORKERS, JobSpec
from oomrun.core.state import JobState
from oomrun.core.state_memory import limits_of
from oomrun.core.topology import Inventory
from oomrun.profiles import Profiles

__all__ = ["Remembering", "environment_of"]


def environment_of(
    spec: JobSpec,
    plan: Plan,
    inventory: Inventory,
    variables: Mapping[str, str],
    replicas: int = 1,
) -> dict[str, Any]:
    """What the supervisor knows of ``profile.Environment``; the worker adds the rest.

    Args:
        spec: what the user wrote.
        plan: of the worker.
        inventory: the machine.
        variables: the worker's whole environment.
        replicas: how many train together.
    """
    planned = plan.devices[0]
    device = next((d for d in inventory.devices if d.id == planned.id), None)
    return {
        "versions": {"oomrun": oomrun.__version__},
        "device_kind": planned.kind,
        "device_name": (device.name if device else None) or "",
        "driver": None if planned.kind == "cpu" else inventory.driver_version,
        "cpu_count": inventory.host.cpu_count,
        "memory_mode": plan.memory_mode,
        "strategy": plan.strategy,
        "replicas": replicas,
        "batch_norm": spec.batch.batch_norm,
        "variables": {
            **relevant_variables(variables),
            **({"levers": " ".join(plan.levers)} if plan.levers else {}),
        },
    }


class Remembering:
    """Answers the workers of a run, and stores what they measure.

    Args:
        profiles: where it is kept.
    """

    def __init__(self, profiles: Profiles) -> None:
        self._profiles = profiles

    def answer(self, before: JobState, event: ev.Event) -> dict[str, Any] | None:
        """The message that a worker's event asks for; None for most.

        Args:
            before: the state without the event.
            event: what the worker said.
        """
        match event:
            case ev.FitStarted(profile_key=str() as key):
                if before.profile_key != key:
                    self.keep(before)
                return self._known(key, _limit(before, 0))
            case ev.SizesWanted():
                return self._known(event.profile_key, _limit(before, event.rank))
            case ev.SizesTried():
                self._keep_tried(event, _limit(before, event.rank))
        return None

    def _known(self, key: str, limit: int | None) -> dict[str, Any]:
        found = self._profiles.load(key) or Profile()
        return {
            "do": REMEMBERED,
            "key": key,
            "measured": [list(item) for item in found.measured.items()],
            "recorded": [list(item) for item in found.recorded.items()],
            "failed": found.smallest_failed(limit) if limit else None,
        }

    def keep(self, state: JobState) -> None:
        """Stores what is known of the model of the current fit."""
        if state.profile_key is None or not state.measured or _together(state):
            return
        limit = state.limit_when_failed_bytes
        failed = state.micro_batch_failed
        self._profiles.store(
            state.profile_key,
            Profile(
                state_bytes=state.state_bytes,
                measured=state.measured,
                recorded=state.recorded,
                failed={failed: limit} if failed and limit else {},
                steps=state.step,
            ),
        )

    def _keep_tried(self, event: ev.SizesTried, limit: int | None) -> None:
        tried = dict(zip(event.sizes, event.peaks, strict=False))
        failed = [size for size, peak in tried.items() if peak is None]
        pools = dict(zip(event.sizes, event.pools, strict=False))
        self._profiles.store(
            event.profile_key,
            Profile(
                measured={n: peak for n, peak in tried.items() if peak is not None},
                recorded={n: pool for n, pool in pools.items() if pool is not None},
                failed=dict.fromkeys(failed, limit) if limit else {},
            ),
        )


def _together(state: JobState) -> bool:
    """Whether several devices train: what a step takes there is not what a trial does.

    Workers of a group then tell what they have tried, see ``SizesTried``.
    """
    plan = state.plan or {}
    return plan.get("strategy") in IN_WORKERS or len(plan.get("devices", ())) > 1


def _limit(state: JobState, rank: int) -> int | None:
    """The limit of the device that a worker has, or has first."""
    limits = limits_of(state.plan)
    return limits[rank] if rank < len(limits) else None
