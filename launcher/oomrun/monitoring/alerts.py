"""The alert rules: when a person should look, and what to do then.

Covers: conditions and texts. Does not cover: the forms in which they are handed over
(``export.py``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

__all__ = ["ALERTS", "GROUP", "RECORDED", "Alert", "rules"]

GROUP = "oomrun"
_ACTIVE = "starting|training|evaluating|checkpointing|adapting|recovering"
_OVER = "completed|failed|preempted"
_TRAINING = 'max by (run) (oomrun_run_state{oomrun_run_state="training"}) == 1'


@dataclass(frozen=True, slots=True, kw_only=True)
class Alert:
    """One alert.

    Attributes:
        expr: holds for what is wrong.
        wait: how long it must hold.
        severity: info, warning, or critical.
        summary: what is wrong, in one line.
        action: what to do about it.
        board: the dashboard that shows it.
    """

    name: str
    expr: str
    wait: str
    severity: str
    summary: str
    action: str
    board: str = "oomrun-control"

    def to_json(self) -> dict[str, Any]:
        """The alert as Prometheus has it."""
        return {
            "alert": self.name,
            "expr": self.expr,
            "for": self.wait,
            "labels": {"severity": self.severity},
            "annotations": {
                "summary": self.summary,
                "description": self.action,
                "dashboard": self.board,
            },
        }


def rules() -> dict[str, Any]:
    """A rules file of Prometheus."""
    recorded = [{"record": name, "expr": expr} for name, expr in RECORDED.items()]
    alerts = [alert.to_json() for alert in ALERTS]
    return {"groups": [{"name": GROUP, "rules": [*recorded, *alerts]}]}


#: What others may want to build on, under names of their own.
RECORDED = {
    "run:oomrun_device_memory_headroom:min_ratio": "min by (run) "
    "(oomrun_device_memory_headroom_bytes / oomrun_device_memory_limit_bytes)",
}


ALERTS = (
    Alert(
        name="OomrunHeadroomLow", wait="5m", severity="warning",
        board="oomrun-memory",
        expr="min by (run, device) (oomrun_device_memory_headroom_bytes "
        "/ oomrun_device_memory_limit_bytes) < 0.05",
        summary="{{ $labels.run }}: {{ $value | humanizePercentage }} of the memory "
        "limit of {{ $labels.device }} is left",
        action="The run goes on, and takes a smaller micro-batch if memory runs out. "
        "To keep more distance, set memory.headroom to 15% or batch.micro.max to half "
        "of the present micro-batch, stop the run with SIGTERM and start it again.",
    ),
    Alert(
        name="OomrunMemoryExhaustionPredicted", wait="10m", severity="warning",
        board="oomrun-memory",
        expr="(predict_linear(oomrun_device_memory_headroom_bytes[30m], 3600) < 0) "
        "and (oomrun_device_memory_headroom_bytes / oomrun_device_memory_limit_bytes "
        "< 0.25) and (deriv(oomrun_device_memory_in_use_bytes[30m]) > 0)",
        summary="{{ $labels.run }}: memory of {{ $labels.device }} runs out within "
        "the hour at the present rate",
        action="Memory in use grows, which looks like a leak. oomrun restarts the "
        "worker from a checkpoint before it runs out; look for tensors or functions "
        "that the script keeps from step to step, and shorten checkpoint.every.",
    ),
    Alert(
        name="OomrunOutOfMemory", wait="0m", severity="info", board="oomrun-memory",
        expr="sum by (run, kind) (increase(oomrun_oom_events_total[15m])) > 0",
        summary="{{ $labels.run }}: {{ $labels.kind }} memory ran out",
        action="Nothing, if the run goes on: the micro-batch was made smaller. "
        "`oomrun status RUN_DIR` says what was decided. Host memory is not oomrun's to "
        "save: load less data at once.",
    ),
    Alert(
        name="OomrunRepeatedOutOfMemory", wait="0m", severity="warning",
        board="oomrun-memory",
        expr="sum by (run) (increase(oomrun_oom_events_total[30m])) > 2.5",
        summary="{{ $labels.run }}: memory ran out three times or more in 30 minutes",
        action="Each time steps or minutes are lost. Start with less: set "
        "batch.micro.max to the micro-batch that `oomrun status RUN_DIR` shows. If a "
        "neighbour takes the memory, set memory.limit or choose another device.",
    ),
    Alert(
        name="OomrunAdaptationFlapping", wait="0m", severity="warning",
        expr="min by (run, action) (sum by (run, action, direction) "
        "(increase(oomrun_adaptations_total[1h]))) > 2.5",
        summary="{{ $labels.run }}: {{ $labels.action }} goes up and down",
        action="What fits changes all the time, mostly because another program shares "
        "the device. Set batch.micro.max to the smaller size, or memory.limit to what "
        "is always free.",
    ),
    Alert(
        name="OomrunRecoveryStuck", wait="15m", severity="critical",
        expr='max by (run) (oomrun_run_state{oomrun_run_state=~"starting|adapting|'
        'recovering"}) == 1',
        summary="{{ $labels.run }} has been starting or recovering for 15 minutes",
        action="Read the end of RUN_DIR/attempts/*/rank-0.log: a device that does not "
        "answer, data that are not there, or a compilation that takes this long. Stop "
        "it with SIGTERM; the same command goes on.",
    ),
    Alert(
        name="OomrunStalled", wait="10m", severity="critical",
        expr="(sum by (run) (increase(oomrun_steps_total[10m])) == 0) and on (run) "
        f"({_TRAINING})",
        summary="{{ $labels.run }} is training, but has taken no step for 20 minutes",
        action="Look at what the worker waits for (`py-spy dump --pid PID`, its pid is "
        "in RUN_DIR/journal.jsonl): mostly data that do not come. Stop it with "
        "SIGTERM; the same command goes on from a checkpoint.",
    ),
    Alert(
        name="OomrunCheckpointStale", wait="5m", severity="warning",
        expr="(time() - (max by (run) "
        "(oomrun_checkpoint_last_success_timestamp_seconds) or max by (run) "
        "(oomrun_run_start_timestamp_seconds)) > 3600) and on (run) "
        f"({_TRAINING}) and on (run) (max by (run) (oomrun_step))",
        summary="{{ $labels.run }}: the last checkpoint is "
        "{{ $value | humanizeDuration }} old",
        action="All since then is lost if the machine dies. Set checkpoint.every to "
        "10min, or raise this rule's 3600 s where that is meant; where checkpoints "
        "fail, OomrunCheckpointFailing says so.",
    ),
    Alert(
        name="OomrunCheckpointFailing", wait="0m", severity="critical",
        expr="sum by (run) (increase(oomrun_checkpoint_failures_total[30m])) > 0 or "
        "sum by (run) (increase(oomrun_checkpoint_mirror_failures_total[30m])) > 0",
        summary="{{ $labels.run }}: a checkpoint could not be written",
        action="Free space where checkpoints go (checkpoint.dir), or set "
        "checkpoint.keep to 1; where that is a URL, see that it can be reached. The "
        "run goes on meanwhile; the last whole checkpoint stays.",
    ),
    Alert(
        name="OomrunRestartLoop", wait="0m", severity="warning",
        expr="sum by (run, reason) (increase(oomrun_restarts_total[1h])) > 2.5",
        summary="{{ $labels.run }} was restarted three times or more in an hour "
        "({{ $labels.reason }})",
        action="Read what `oomrun status RUN_DIR` gives as the last decision, and the "
        "logs of the attempts. recovery.max_restarts ends the run in time; nothing is "
        "lost but time.",
    ),
    Alert(
        name="OomrunWorkerMissing", wait="5m", severity="critical",
        expr="max by (run) (oomrun_workers_alive) "
        "< max by (run) (oomrun_workers_expected)",
        summary="{{ $labels.run }}: a worker has been missing for 5 minutes",
        action="The supervisor should have started another one by now. Read its own "
        "output; stop it with SIGTERM, and start the same command again.",
    ),
    Alert(
        name="OomrunRunFailed", wait="0m", severity="critical",
        expr="max by (run) (max_over_time("
        'oomrun_run_state{oomrun_run_state="failed"}[15m])) == 1',
        summary="{{ $labels.run }} has failed",
        action="`oomrun status RUN_DIR` says why, and names the log. After a fix the "
        "same command goes on from the last checkpoint.",
    ),
    Alert(
        name="OomrunRunVanished", wait="5m", severity="critical",
        expr="(max by (run) (max_over_time("
        f'oomrun_run_state{{oomrun_run_state=~"{_ACTIVE}"}}[30m])) == 1) '
        "unless on (run) (max by (run) (oomrun_run_state)) "
        "unless on (run) (max by (run) (max_over_time("
        f'oomrun_run_state{{oomrun_run_state=~"{_OVER}"}}[30m])) == 1)',
        summary="{{ $labels.run }} was running, and its metrics are gone without an "
        "end",
        action="The supervisor or its machine died, or the network did. Start the same "
        "command again: it goes on from the last checkpoint. A scrape interval above "
        "15 s misses the end of runs, which looks the same.",
    ),
    Alert(
        name="OomrunHostMemoryHigh", wait="5m", severity="warning",
        board="oomrun-memory",
        expr="max by (instance) (oomrun_host_memory_used_bytes "
        "/ oomrun_host_memory_limit_bytes) > 0.9",
        summary="{{ $labels.instance }}: {{ $value | humanizePercentage }} of the "
        "host's memory is in use",
        action="At 100 % the kernel kills the training or oomrun itself. Load less at "
        "once: smaller shuffle and prefetch buffers, no cache() in memory, fewer "
        "workers; in a pod raise kubernetes.memory. Stop the run with SIGTERM first: "
        "the same command goes on.",
    ),
    Alert(
        name="OomrunCollectorFailing", wait="10m", severity="warning",
        board="oomrun-fleet",
        expr="min by (instance, collector) (oomrun_collector_success) == 0",
        summary="{{ $labels.instance }}: {{ $labels.collector }} cannot be read",
        action="For nvml see what `oomrun devices` and nvidia-smi say: a driver that "
        "hangs or was updated, or a GPU that has fallen off the bus. A run that trains "
        "may hang in it too; end it with SIGTERM once the driver is well.",
    ),
)  # fmt: skip
