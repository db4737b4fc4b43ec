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
from oomrun.core.spec import JobSpec
from oomrun.core.state import JobState
from oomrun.core.state_memory import planned_limit_bytes
from oomrun.core.topology import Inventory
from oomrun.profiles import Profiles

__all__ = ["Remembering", "environment_of"]


def environment_of(
    spec: JobSpec, plan: Plan, inventory: Inventory, variables: Mapping[str, str]
) -> dict[str, Any]:
    """What the supervisor knows of ``profile.Environment``; the worker adds the rest.

    Args:
        spec: what the user wrote.
        plan: of the attempt.
        inventory: the machine.
        variables: the worker's whole environment.
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
        "replicas": len(plan.devices),
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
        if not isinstance(event, ev.FitStarted) or event.profile_key is None:
            return None
        if before.profile_key != event.profile_key:
            self.keep(before)
        found = self._profiles.load(event.profile_key)
        limit = planned_limit_bytes(before.plan)
        return {
            "do": REMEMBERED,
            "key": event.profile_key,
            "measured": [list(item) for item in found.measured.items()]
            if found
            else [],
            "failed": found.smallest_failed(limit) if found and limit else None,
        }

    def keep(self, state: JobState) -> None:
        """Stores what is known of the model of the current fit."""
        if state.profile_key is None or not state.measured:
            return
        limit = state.limit_when_failed_bytes
        failed = state.micro_batch_failed
        self._profiles.store(
            state.profile_key,
            Profile(
                state_bytes=state.state_bytes,
                measured=state.measured,
                failed={failed: limit} if failed and limit else {},
                steps=state.step,
            ),
        )
