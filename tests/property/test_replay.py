"""Events and their sum: whatever the order, and whenever a supervisor is killed."""

from __future__ import annotations

import json
import typing
from dataclasses import fields, replace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from oomrun import takeover
from oomrun.core import event_json
from oomrun.core import events as ev
from oomrun.core.diagnosis import Diagnosis, Evidence, diagnose
from oomrun.core.policy import Decision, Finish, Limits, Restart, decide
from oomrun.core.state import JobState, replay
from oomrun.recorder import joined

# Not Event.__subclasses__(), which has each class twice: with its slots and without.
NAMED = [getattr(ev, name) for name in ev.__all__]
TYPES = [cls for cls in NAMED if getattr(cls, "type", "unknown") not in ("", "unknown")]
INT = st.integers(-5, 2**62)
FLOAT = st.floats(-1e15, 1e15)
TEXT = st.text(max_size=5)
JSON = st.recursive(
    st.none() | st.booleans() | INT | TEXT,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3)
    ),
    max_leaves=5,
)
DEVICE = st.builds(
    ev.DeviceMemory,
    device=TEXT,
    in_use_bytes=st.none() | INT,
    peak_bytes=st.none() | INT,
    limit_bytes=st.none() | INT,
)
# The words that states hang on, beside any other.
WORDS = st.sampled_from(
    ["restart", "in_process", "gradients", "evaluate", "oom", "crash", "training"]
)


def _values(hint: Any) -> st.SearchStrategy[Any]:
    """Values of a field's type."""
    simple: dict[Any, st.SearchStrategy[Any]] = {
        int: INT, float: FLOAT, bool: st.booleans(), str: TEXT | WORDS,
    }  # fmt: skip
    if hint in simple:
        return simple[hint]
    options = [arg for arg in typing.get_args(hint) if arg is not type(None)]
    if type(None) in typing.get_args(hint):
        return st.none() | _values(options[0])
    if typing.get_origin(hint) is tuple:
        inner = DEVICE if options[0] is ev.DeviceMemory else _values(options[0])
        return st.lists(inner, max_size=2).map(tuple)
    return st.dictionaries(TEXT | st.just("devices"), JSON, max_size=3)


def _events_of(cls: type[ev.Event]) -> st.SearchStrategy[ev.Event]:
    hints = typing.get_type_hints(cls)
    return st.builds(cls, **{f.name: _values(hints[f.name]) for f in fields(cls)})


EVENTS = st.sampled_from(TYPES).flatmap(_events_of)


@given(EVENTS)
def test_every_event_survives_the_journal(event: ev.Event) -> None:
    line = json.dumps(event_json.to_json(event), allow_nan=False)
    assert event_json.from_json(json.loads(line)) == event


@given(st.lists(EVENTS, max_size=12))
@settings(max_examples=200)
def test_replay_never_raises(events: list[ev.Event]) -> None:
    state = JobState()
    for number, event in enumerate(events):
        state = state.after(event)
        assert replay(events[: number + 1]) == state


@given(JSON | st.dictionaries(st.sampled_from(["at", "type", "attempt"]), JSON))
def test_what_is_no_event_is_told(value: Any) -> None:
    try:
        event_json.from_json(value)
    except event_json.MalformedEventError:
        return


@given(st.lists(_events_of(ev.Progressed), min_size=2, max_size=2))
def test_joined_progress_adds_up_to_the_same(both: list[Any]) -> None:
    steps = [min(abs(event.window_steps), 1000) for event in both]
    first, then = (
        replace(event, step_s=0.5, window_steps=n, attempt=1, fit=1)
        for event, n in zip(both, steps, strict=True)
    )
    then = replace(
        then,
        micro_batch_size=first.micro_batch_size,
        global_batch_size=first.global_batch_size,
        step=max(then.step, first.step),
    )
    one = joined(first, then)
    assert one is not None
    apart, together = replay([first, then]), replay([one])
    for name in ("step", "samples", "peaks", "measured", "steps_timed", "loss"):
        assert getattr(together, name) == getattr(apart, name)


class KilledSupervisors(RuleBasedStateMachine):
    """A run whose supervisor is killed between any two events.

    The worker runs out of memory above 2 samples a pass and needs ten steps. What a
    supervisor knows is the journal; however often one dies, the run ends the same.
    """

    LIMITS = Limits(max_restarts={"oom": 10, "crash": 3, "preemption": None})

    def __init__(self) -> None:
        super().__init__()
        self.journal: list[ev.Event] = []
        self.checkpoint = 0
        self.alive = False
        self.state = JobState()
        self.undecided: Diagnosis | None = None

    def record(self, event: ev.Event) -> None:
        self.journal.append(event)
        self.state = self.state.after(event)

    @precondition(lambda self: not self.alive)
    @rule()
    def take_over(self) -> None:
        before = self.state = replay(self.journal)
        self.alive = True
        self.undecided = None
        if before.state == "completed":
            return
        if not before.run_id:
            start = {"run_id": "r", "name": "n", "version": "0", "seed": 1}
            self.record(ev.RunStarted(at=0.0, mathematics={}, **start))
            return
        self.record(ev.RunResumed(at=0.0, pid=1, reason=takeover.reason(before)))
        if before.attempt_open:
            ended = takeover.end_of_lost_attempt(before)
            self._end_attempt(ended)
        else:
            self.undecided = takeover.undecided(self.journal[:-1])

    @rule()
    def kill(self) -> None:
        self.alive = False

    @precondition(lambda self: self.alive and self.state.state != "completed")
    @rule()
    def go_on(self) -> None:
        if self.undecided is not None:
            self._decide()
        elif not self.state.attempt_open:
            size = self.state.micro_batch_limit or 8
            plan = {"global_batch_size": 8, "devices": [{"micro_batch_size": size}]}
            number = self.state.attempt + 1
            self.record(ev.AttemptStarted(at=0.0, attempt=number, plan=plan))
        else:
            self._work()

    def _work(self) -> None:
        assert self.state.plan is not None
        size = self.state.plan["devices"][0]["micro_batch_size"]
        if self.state.script is not None or self.state.last_oom is not None:
            evidence = Evidence(script=self.state.script, oom=self.state.last_oom)
            self._end_attempt(diagnose(evidence))
        elif size > 2:
            self.record(
                ev.OomOccurred(
                    at=0.0,
                    attempt=1,
                    rank=0,
                    device="cpu:0",
                    kind="device",
                    step=0,
                    phase="gradients",
                    recovery="restart",
                    micro_batch_size=size,
                    message="",
                )
            )
        elif self.checkpoint < 10:
            self.checkpoint += 1
            step = self.checkpoint
            self.record(
                ev.Progressed(
                    at=0.0,
                    attempt=1,
                    fit=1,
                    step=step,
                    samples=step * 8,
                    epoch=1,
                    step_in_epoch=step,
                    loss=None,
                    window_steps=1,
                    step_s=0.0,
                    global_batch_size=8,
                    micro_batch_size=size,
                )
            )
        else:
            self.record(
                ev.ScriptEnded(
                    at=0.0, attempt=1, rank=0, outcome="finished", exit_code=0
                )
            )

    def _end_attempt(self, ended: Diagnosis) -> None:
        self.record(
            ev.AttemptEnded(
                at=0.0,
                attempt=1,
                cause=ended.cause.value,
                summary=ended.summary,
                exit_code=None,
            )
        )
        self.undecided = ended

    def _decide(self) -> None:
        assert self.undecided is not None
        decision: Decision = decide(self.undecided, self.state, self.LIMITS)
        assert isinstance(decision, Finish | Restart), decision.reason
        restart = isinstance(decision, Restart)
        self.record(
            ev.DecisionMade(
                at=0.0,
                attempt=1,
                action="restart" if restart else "finish",
                cause=self.undecided.cause.budget,
                reason=decision.reason,
                micro_batch_size=getattr(decision, "micro_batch_size", None),
            )
        )
        if not restart:
            self.record(
                ev.RunEnded(at=0.0, state="completed", exit_code=0, reason="done")
            )
        self.undecided = None

    def teardown(self) -> None:
        """However it was interrupted: let alone, it ends, and always the same."""
        self.kill()
        self.take_over()
        for _ in range(60):
            if self.state.state == "completed":
                break
            self.go_on()
        assert self.state.state == "completed"
        assert (self.state.step, self.state.samples) == (10, 80)
        assert self.state.restarts["oom"] == 2
        assert self.state.micro_batch_limit == 2
        assert self.state == replay(self.journal)


TestKilledSupervisors = KilledSupervisors.TestCase
