"""The keys of a job file, as one table.

Whatever is said about a key anywhere (what it accepts, its default, the JSON Schema,
``docs/job-file.md``) is said here once.
"""

from oomrun.core.jobfile import values
from oomrun.core.jobfile.fields_devices import BATCH, DEVICES, HOSTS, MEMORY
from oomrun.core.jobfile.fields_kubernetes import KUBERNETES
from oomrun.core.jobfile.fields_run import CHECKPOINT, METRICS, RECOVERY
from oomrun.core.jobfile.kinds import Field, ListOf, MapOf, Section, choice

_PROGRAM = (
    Field(
        key="script",
        kind=values.PATH,
        about=(
            "The Python script to run, relative to the folder of the job file. It is "
            "run as `python SCRIPT ARGS` would run it, unchanged. A job has exactly "
            "one of `script`, `module` and `command`."
        ),
        examples=("train.py",),
    ),
    Field(
        key="module",
        kind=values.MODULE,
        about="The Python module to run, as `python -m MODULE ARGS` would.",
        examples=("package.train",),
    ),
    Field(
        key="command",
        kind=ListOf(
            words="a list of words such as [python, train.py]",
            item=values.WORD,
            shortest=1,
        ),
        about=(
            "Any other program, as its words; no shell reads them. The first is looked "
            "up in `PATH` or, with a slash in it, from the folder of the job file. "
            "The program runs in the folder where oomrun was called. `{micro_batch}`, "
            "`{global_batch}` and `{accumulation_steps}` become numbers, here and in "
            "`env`; `{{` and `}}` stand for braces. The program finds the same numbers "
            "in `OOMRUN_MICRO_BATCH`, `OOMRUN_GLOBAL_BATCH` and "
            "`OOMRUN_ACCUMULATION_STEPS`, and where to keep its checkpoints in "
            "`OOMRUN_CHECKPOINT_DIR`. It accumulates that many micro-batches into one "
            "optimizer step by itself, and needs `batch.global`. See "
            "[recipes](recipes.md#any-other-program)."
        ),
        examples=(
            ["python", "x.py", "--batch", "{micro_batch}"],
            ["./train.sh", "--epochs", 5],
        ),
    ),
    Field(
        key="args",
        kind=ListOf(words="a list of text and numbers", item=values.WORD),
        about=(
            "The arguments of the script or module, each passed on as it is written. "
            "Variables are expanded."
        ),
        default=[],
        examples=(["--epochs", 5], ["--data", "${DATA_DIR:-/data}"]),
    ),
    Field(
        key="env",
        kind=MapOf(
            words="a mapping of environment variables",
            key=values.VARIABLE,
            value=values.WORD,
        ),
        about=(
            "Environment variables to add to the script's own, each passed on as it "
            "is written. Variables are expanded, from the environment that oomrun "
            "was called in. In a job with a `command`, numbers in braces are filled in."
        ),
        default={},
        examples=({"DATA_DIR": "/data/digits"},),
    ),
)

JOB = Section(
    "a mapping of keys such as name and script",
    (
        Field(
            key="name",
            kind=values.NAME,
            about=(
                "The name of the job and of its run directory. It becomes a folder "
                "and a Kubernetes label."
            ),
            examples=("digits-cnn",),
            required=True,
        ),
        *_PROGRAM,
        Field(
            key="strategy",
            kind=choice(
                "auto", "single", "mirrored", "horovod", "multi_worker_mirrored"
            ),
            about=(
                "How the work is spread over devices. `single` trains on one; "
                "`mirrored` on several, in one worker; `horovod` and "
                "`multi_worker_mirrored` start a worker for each, which take every "
                "step together: Horovod (it must be installed) or TensorFlow itself "
                "adds their gradients up; `auto` chooses, and `oomrun plan` says what "
                "and why."
            ),
            default="auto",
            examples=("single", "mirrored", "multi_worker_mirrored"),
        ),
        Field(
            key="devices",
            kind=DEVICES,
            about=(
                "What to train on. `auto` takes a GPU if there is one and the CPU "
                "otherwise; a list names GPUs by index (in PCI order) or UUID; a "
                "mapping with `cpu` gives the CPU device a memory limit."
            ),
            default="auto",
            examples=("cpu", [0], ["GPU-8f6d9a3c"], {"cpu": 1, "memory": "600MiB"}),
        ),
        Field(
            key="hosts",
            kind=HOSTS,
            about=(
                "The hosts to train on, with `strategy: horovod` or "
                "`multi_worker_mirrored` (`auto` takes one of them), reached over ssh "
                "without a password; the one that oomrun runs on must be named too if "
                "it is to train. Each has what `devices` and `memory` say. Python, "
                "oomrun, the script, its data and the run directory are found under "
                "the same paths on all of them. `slurm` takes those of the Slurm job "
                "that oomrun runs in; without the key it is this host alone. See "
                "[recipes](recipes.md#several-hosts)."
            ),
            examples=(["node1", "node2"], "slurm", {"file": "hostfile"}),
        ),
        Field(
            key="batch",
            kind=BATCH,
            about="How one optimizer step is cut up.",
        ),
        Field(
            key="memory",
            kind=MEMORY,
            about="How much memory a device may use.",
        ),
        Field(
            key="recovery",
            kind=RECOVERY,
            about="What to do when memory runs out or a process dies.",
        ),
        Field(
            key="checkpoint",
            kind=CHECKPOINT,
            about="Where the training can go on from.",
        ),
        Field(key="metrics", kind=METRICS, about="Where to tell how it goes."),
        Field(
            key="kubernetes",
            kind=KUBERNETES,
            about="How to run on a cluster.",
        ),
    ),
)
