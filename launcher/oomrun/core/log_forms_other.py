"""Forms of failures that have nothing to do with memory.

See ``log_forms``.
"""

from __future__ import annotations

from oomrun.core.log_form import Form, form

__all__ = ["NO_MEMORY"]

NO_MEMORY: tuple[Form, ...] = (
    # ----- no memory at all -----
    # What may have happened to it, as one task tells of another.
    form(
        "peer_lost",
        "other",
        r"remote task has failed, got preempted|Collective ops is aborted by",
    ),
    form(
        "preemption",
        "other",
        r"\bDUE TO (?:PREEMPTION|TIME LIMIT|NODE FAILURE)|CANCELLED (?:AT|by)\b",
        r"\b(?:[Pp]reempted|[Pp]reempting|PREEMPTED)\b",
        r"(?:[Ss]pot|[Pp]reemptible) (?:instance|VM|node)\b.{0,60}"
        r"(?:interrupt|terminat|reclaim|shut)",
        r"failed liveness probe|job killed: (?:walltime|cput)",
        r"[Ww]all ?time .{0,40}exceeded",
        r"hard limit .?[hs]_(?:cpu|rt)\b|resource allocation expired",
        r"timeout: sending signal|Failed with result 'timeout'",
        r"[Ee]xceeded (?:hard )?(?:wall ?(?:clock )?time|time limit)",
        r"[Cc]ancell?ed by user|^KeyboardInterrupt\b",
        r"DeadlineExceeded|active longer than specified deadline",
        r"(?:[Rr]eceived|[Gg]ot|[Cc]aught) (?:signal )?(?:SIGTERM|15\b|termination)",
        r"TaintManagerEviction|NodeShutdown|node is (?:being )?(?:drained|shutting)",
        r"DisruptionTarget|TERM_OWNER|TERM_RUNLIMIT|JobState=(?:PREEMPTED|TIMEOUT)",
    ),
    form(
        "hang",
        "other",
        r"Watchdog caught collective operation timeout",
        r"Stalled (?:ranks|ops):|waiting for remainder of ranks for more than",
        r"(?:collective|[Rr]endezvous|barrier|heartbeat)\b.{0,120}\btimed? ?out\b",
        r"Timed out waiting for .{0,40}(?:clients|workers|ranks|peers)",
        r"blocked for more than \d+ seconds",
    ),
    form(
        "preemption",
        "killed",
        r"^Terminated$|\bline \d+: {0,8}\d+ Terminated\b",
        r"(?:[Ee]xit|status)\w{0,6}(?: with)?(?: status)?(?: code)?"
        r"\W{1,3}(?:143|-15)\b",
    ),
    form(
        "peer_lost",
        "other",
        r"^(?:[\w.]{0,80}\.)?(?:UnavailableError|AbortedError|CancelledError|UnknownError"
        r"|HorovodInternalError|Connection\w{1,20}Error|BrokenPipeError"
        r"|DistBackendError)(?=:|$)",
        r"[Hh]orovod detected that one or more processes",
        # A parent tells that a child is gone, and does not know of what.
        r"\b(?:TerminatedWorkerError|BrokenProcessPool|BrokenExecutor|WorkerLostError"
        r"|WorkerCrashedError|(?:Ray)?Actor(?:Died)?Error)(?=:|$)",
        r"[Pp]rocess pool was terminated abruptly|\) exited unexpectedly",
        r"[Uu]nexpected task registered|[Cc]oordination agent is (?:set to|in) ERROR",
        r"failed to connect to all addresses",
        r"\bChildFailedError\b",
        r"mpirun (?:noticed|has exited)|Primary job\s+terminated",
        r"Connection (?:reset|closed) by (?:remote )?peer",
        r"Socket closed",
        r"Horovod has been shut down",
        r"Broken pipe",
        r"KernelRestarter: restarting kernel|\bDeadKernelError\b",
        r"kernel appears to have died",
        r"[Cc]onnection refused",
        r"(?:worker|peer|rank)\b.{0,60}\b(?:disappeared|unreachable|is gone|has died)",
    ),
    form(
        "threads",
        "other",
        r"pthread_create\(?\)? failed|can't start new thread",
        r"[Rr]esource temporarily unavailable",
    ),
    form(
        "crash",
        "other",
        # The last line of a traceback, whatever was raised.
        r"^(?:[A-Za-z_]\w{0,60}\.){0,8}[A-Z]\w{0,60}(?:Error|Exception|Interrupt|Exit)"
        r"(?=:|$)",
        r"^Process finished with exit code -?[1-9]",
        r"Segmentation fault|SIGSEGV|Check failed:|core dumped",
    ),
)
