"""The commented job file that ``oomrun init train.py`` writes."""

from oomrun.core.jobfile.reference import flow
from oomrun.core.jobfile.values import slug


def init_text(
    script: str, *, name: str | None = None, batch_size: int | None = None
) -> str:
    """A valid job file for a script; every optional key is there as a comment.

    Args:
        script: The script's path relative to the job file.
        name: The job's name; by default made from the script's file name.
        batch_size: The batch size that the script seems to use, to mention it.
    """
    stem = script.replace("\\", "/").rpartition("/")[2].removesuffix(".py")
    name = slug(name or stem) or "job"
    said = f"; {batch_size} is what the script seems to say" if batch_size else ""
    return f"""\
# An oomrun job file. All keys: docs/job-file.md, or `oomrun schema` for editors.
# Check it with `oomrun validate`, see what it would do with `oomrun plan`.
# Commented keys show their defaults, unless they say "such as".

name: {flow(name)} # of the run directory: runs/{name}
script: {flow(script)} # relative to this file
# args: ["--epochs", 5] # such as
# env: {{TF_CPP_MIN_LOG_LEVEL: 2}} # such as; added to the script's environment

strategy: auto # auto | single
devices: auto # auto | gpu | cpu | [0] | {{cpu: 1, memory: 600MiB}}

batch:
  # Samples per optimizer step. oomrun never changes it{said}.
  global: auto # auto (what the script gives to fit) | a number
  # Samples per forward and backward pass: what memory depends on.
  micro: auto # auto (the largest that fits) | a number | {{max: 64}}

# memory:
#   mode: growth # growth | limit | preallocate
#   limit: auto # auto (what is free) | 20GiB | 90%
#   reserve: auto # auto | 1GiB
#   headroom: 8% # the part of the limit that no plan may count on

# recovery:
#   in_process: auto # auto | never (always restart the process)
#   levers: [micro_batch] # what may be changed to save memory
#   hang_after: auto # auto | never | 20min
#   max_restarts: {{oom: 10, crash: 3, preemption: unlimited, hang: 3}}

checkpoint:
  every: 5min # such as 500 steps, 10min, 1h
  keep: 3
#   dir: checkpoints/{{name}} # such as; default: in the run directory

# metrics:
#   listen: "127.0.0.1:9464" # for Prometheus; none opens no port

# kubernetes: # for `oomrun submit` and `oomrun render`
#   image: registry/team/train:1 # such as
#   volume: {{size: 100GiB}} # such as; what the run is kept on
"""
