"""The part of the table of keys that says what to train on, in how much memory."""

from oomrun.core.jobfile import values
from oomrun.core.jobfile.kinds import (
    Choice,
    Field,
    ListOf,
    OneOf,
    Section,
    Whole,
    choice,
)
from oomrun.core.spec import AUTO, AtMost, Gpus

_MOST_SAMPLES = 2**31 - 1
_SAMPLES = Whole(words="a number of samples", low=1, high=_MOST_SAMPLES)
_AUTO = Choice({"auto": AUTO})
_LIMIT = OneOf((values.LIMIT, values.SHARE_TO_USE))

DEVICES = OneOf(
    (
        Choice({"auto": AUTO, "gpu": Gpus(), "cpu": "cpu"}),
        ListOf(
            words="a list of GPUs such as [0]",
            item=OneOf(
                (Whole(words="an index such as 0", low=0, high=1023), values.UUID)
            ),
            shortest=1,
            unique=True,
        ),
        Section(
            "a mapping such as {cpu: 1, memory: 600MiB}",
            (
                Field(
                    key="cpu",
                    kind=Whole(words="a number of CPU devices", low=1, high=1024),
                    about=(
                        "How many devices the CPU is to be. More than one are to try "
                        "out strategies for several devices."
                    ),
                    examples=(1,),
                    required=True,
                ),
                Field(
                    key="memory",
                    kind=OneOf(
                        (
                            _AUTO,
                            values.LIMIT,
                            values.SHARE_TO_USE,
                            ListOf(
                                words="a list with one for each device",
                                item=_LIMIT,
                                shortest=1,
                            ),
                        )
                    ),
                    about=(
                        "The hard memory limit of each CPU device, or a list with one "
                        "for each; the same as `memory.limit`."
                    ),
                    default="auto",
                    examples=("600MiB", ["600MiB", "200MiB"]),
                ),
            ),
        ),
    )
)

BATCH = Section(
    "a mapping such as {micro: auto}",
    (
        Field(
            key="global",
            kind=OneOf((Choice({"auto": None}), _SAMPLES)),
            about=(
                "The samples in one optimizer step over all devices. oomrun never "
                "changes it. `auto` is the batch size that the script gives to `fit` "
                "or to its dataset."
            ),
            default="auto",
            examples=(256,),
        ),
        Field(
            key="micro",
            kind=OneOf(
                (
                    _AUTO,
                    _SAMPLES,
                    Section(
                        "a mapping such as {max: 64}",
                        (
                            Field(
                                key="max",
                                kind=Whole(
                                    words="a number of samples",
                                    low=1,
                                    high=_MOST_SAMPLES,
                                    make=AtMost,
                                ),
                                about="The largest micro-batch that may be chosen.",
                                examples=(64,),
                                required=True,
                            ),
                        ),
                    ),
                )
            ),
            about=(
                "The samples in one forward and backward pass on one device, which is "
                "what memory depends on. `auto` chooses the largest that fits; a "
                "number fixes where to start; `{max: 64}` chooses up to 64."
            ),
            default="auto",
            examples=(32, {"max": 64}),
        ),
        Field(
            key="batch_norm",
            kind=choice("micro_batch", "freeze", "refuse"),
            about=(
                "What BatchNormalization does in a step that is cut, where the "
                "statistics of the whole batch cannot be had. `micro_batch`: each "
                "micro-batch uses its own, and a note says so; `freeze`: it uses its "
                "moving averages and does not change them, in every step, cut or not; "
                "`refuse`: models that have it are not cut."
            ),
            default="micro_batch",
            examples=("refuse",),
        ),
        Field(
            key="shares",
            kind=choice("auto", "by_memory"),
            about=(
                "What each of several devices does of a global batch. `auto`: all "
                "alike at first, or what fits in one pass; once some steps were "
                "timed, by speed, where that makes a step shorter by a tenth. "
                "`by_memory` takes no times: the same shares, and so the same "
                "roundings, in each run."
            ),
            default="auto",
            examples=("by_memory",),
        ),
    ),
)

HOSTS = OneOf(
    (
        choice("slurm"),
        ListOf(
            words="a list such as [node1, node2]",
            item=values.HOST,
            shortest=1,
            unique=True,
        ),
        Section(
            "a mapping such as {file: hostfile}",
            (
                Field(
                    key="file",
                    kind=values.PATH,
                    about=(
                        "An MPI hostfile, relative to the folder of the job file: a "
                        "host in each line. What it says of slots is not read."
                    ),
                    examples=("hostfile",),
                    required=True,
                ),
            ),
        ),
    )
)

MEMORY = Section(
    "a mapping such as {limit: 20GiB}",
    (
        Field(
            key="mode",
            kind=choice("growth", "limit", "preallocate"),
            about=(
                "How TensorFlow takes GPU memory. `growth`: as it needs it, with no "
                "hard limit; `limit`: as it needs it, up to a hard limit; "
                "`preallocate`: all of the limit at once, when TensorFlow first uses "
                "the GPU. TensorFlow's functions allow growth or a limit, not both, so "
                "a limit that is given makes the mode `limit`."
            ),
            default="growth",
            examples=("limit",),
        ),
        Field(
            key="limit",
            kind=OneOf(
                (
                    _AUTO,
                    values.LIMIT,
                    values.SHARE_TO_USE,
                    ListOf(
                        words="a list with one for each device",
                        item=_LIMIT,
                        shortest=1,
                    ),
                )
            ),
            about=(
                "The memory that each device may use. `auto` is what is free at the "
                "start, less the reserve. On a CPU device it is a hard limit too."
            ),
            default="auto",
            examples=("20GiB", "90%", ["20GiB"]),
        ),
        Field(
            key="reserve",
            kind=OneOf((_AUTO, values.SIZE)),
            about=(
                "The memory to leave outside TensorFlow's pool for the CUDA context, "
                "cuDNN and NCCL."
            ),
            default="auto",
            examples=("1GiB",),
        ),
        Field(
            key="headroom",
            kind=OneOf((values.SHARE_TO_LEAVE, values.SIZE)),
            about="The part of the limit that no plan may count on.",
            default="8%",
            examples=("5%", "512MiB"),
        ),
        Field(
            key="probe",
            kind=choice("auto", "never"),
            about=(
                "Whether a few micro-batches are tried before the first step of a fit, "
                "where it is not sure that the whole batch fits: what they change is "
                "put back. `never` starts with the whole batch, and finds its "
                "micro-batch by running out of memory."
            ),
            default="auto",
            examples=("never",),
        ),
    ),
)
