"""The part of the table of keys that says how a run is kept going and watched."""

from oomrun.core.jobfile import values
from oomrun.core.jobfile.kinds import (
    Choice,
    Field,
    Flag,
    ListOf,
    OneOf,
    Section,
    Whole,
    choice,
)
from oomrun.core.levers import FEWER_DEVICES, LEVERS

_RESTARTS = OneOf(
    (
        Whole(words="a number of restarts", low=0, high=1_000_000),
        Choice({"unlimited": None}),
    )
)


def _restarts(key: str, default: int | str, about: str) -> Field:
    return Field(
        key=key,
        kind=_RESTARTS,
        about=about,
        default=default,
        examples=(5 if default != 5 else 6,),
    )


RECOVERY = Section(
    "a mapping such as {in_process: never}",
    (
        Field(
            key="in_process",
            kind=choice("auto", "never"),
            about=(
                "Whether a step that ran out of memory may be tried again in the same "
                "process with a smaller micro-batch, where that is safe. `never` "
                "always restarts the process."
            ),
            default="auto",
            examples=("never",),
        ),
        Field(
            key="levers",
            kind=ListOf(
                words="a list such as [micro_batch]",
                item=choice(
                    "micro_batch",
                    "allocator",
                    "recompute",
                    "mixed_precision",
                    "xla_on",
                    "xla_off",
                    "host_pipeline",
                    "fewer_devices",
                    "optimizer_adafactor",
                    "optimizer_lion",
                    "optimizer_sgd",
                ),
                unique=True,
            ),
            about=(
                "What may be changed to save memory, tried in this order. Only what is "
                "listed is ever changed; with `[]` the first lack of memory ends the "
                "job. `micro_batch` is made smaller as often as it can be, the others "
                "are for a restart each, and one that made it worse is taken back. "
                "`allocator`: cuda_malloc_async, on GPUs with `memory.mode: growth`. "
                "`recompute`: activations within groups of layers are computed again "
                "for the gradients; the numbers stay. `mixed_precision`: layers "
                "compute in bfloat16, which changes the model that comes out. "
                "`xla_on`, `xla_off`: whether XLA compiles the step. `host_pipeline`: "
                "data are made one batch ahead and no more. `fewer_devices`: a device "
                "on which not even one sample fits is left out, wherever it is listed, "
                "and the others do its share; the numbers stay. "
                "`optimizer_adafactor`, `optimizer_lion`, `optimizer_sgd`: on one "
                "device, models are compiled with that optimizer, which keeps less "
                "for each weight; another model comes out. See "
                "[recipes](recipes.md#more-than-the-micro-batch)."
            ),
            default=["micro_batch"],
            examples=([], ["recompute", "micro_batch"]),
        ),
        Field(
            key="pulled",
            kind=ListOf(
                words="a list such as [recompute]",
                # That one is for a device that has failed.
                item=choice(*(name for name in LEVERS if name != FEWER_DEVICES)),
                unique=True,
            ),
            about=(
                "Levers that are in force from the first attempt on, whether memory "
                "runs out or not: what an earlier run has come to, say. None of them "
                "is taken back."
            ),
            default=[],
            examples=(["recompute"],),
        ),
        Field(
            key="max_restarts",
            kind=Section(
                "a mapping such as {oom: 10, crash: 3}",
                (
                    _restarts("oom", 10, "Restarts after running out of memory."),
                    _restarts("crash", 3, "Restarts after a crash of the script."),
                    _restarts(
                        "preemption", "unlimited", "Restarts after a preemption."
                    ),
                    _restarts("hang", 3, "Restarts after a step that did not end."),
                ),
            ),
            about="How often the job may be restarted, for each cause by itself.",
        ),
        Field(
            key="hang_after",
            kind=OneOf((choice("auto", "never"), values.INTERVAL)),
            about=(
                "How long a worker may say nothing, no step, no phase, before it "
                "counts as hanging: the stacks of all workers go into their logs, and "
                "the job is started again from its last checkpoint. `auto` watches "
                "only jobs of several workers, and learns from the run: 20 times the "
                "longest silence so far, at least 30 minutes. A time counts from the "
                "worker's start, so it has to be longer than the first step with its "
                "tracing, a validation and what the script does between two fits."
            ),
            default="auto",
            examples=("20min", "never"),
        ),
        Field(
            key="grow_back",
            kind=Flag(),
            about=(
                "Whether a micro-batch that became smaller since something else took "
                "its memory comes back once that memory has been free at two "
                "checkpoints in a row."
            ),
            default=True,
            examples=(False,),
        ),
    ),
)

CHECKPOINT = Section(
    "a mapping such as {every: 10min}",
    (
        Field(
            key="dir",
            kind=values.FOLDER,
            about=(
                "The folder for checkpoints, relative to the folder of the job file. "
                "Without it they go into the run directory. Variables are expanded, "
                "and `{name}` becomes the job's name. With a URL that TensorFlow's "
                "file layer knows (`gs://`, `file://`; with tensorflow-io `s3://`, "
                "`hdfs://`, `viewfs://`, `har://`, `az://`) they go into the run "
                "directory, and a copy of each to the URL; a run that has none here "
                "goes on from there. See [recipes](recipes.md#checkpoints-in-a-bucket)."
            ),
            examples=(
                "runs/{name}",
                "${SCRATCH:-/tmp}/{name}",
                "gs://bucket/{name}",
            ),
        ),
        Field(
            key="every",
            kind=OneOf((values.STEPS, values.INTERVAL)),
            about=(
                "How often to write one, in optimizer steps or in time. What came "
                "after the last one is lost when the machine dies."
            ),
            default="5min",
            examples=("500 steps", "10min"),
        ),
        Field(
            key="keep",
            kind=Whole(words="a number of checkpoints", low=1, high=10_000),
            about="How many to keep; older ones are deleted.",
            default=3,
            examples=(5,),
        ),
        Field(
            key="timeout",
            kind=values.INTERVAL,
            about=(
                "How long one may take. It is written beside the training, which waits "
                "only where the one before is not done yet. What takes longer is given "
                "up with a warning; the last good one stays, and training goes on."
            ),
            default="10min",
            examples=("2min",),
        ),
    ),
)

_SECRET = (
    Field(
        key="file",
        kind=values.PATH,
        about="A file that holds it; blanks and line breaks at its ends do not count.",
        examples=("secrets/metrics",),
    ),
    Field(
        key="env",
        kind=values.SECRET_VARIABLE,
        about=(
            "The variable of oomrun's own environment that holds it. The script does "
            "not get to see it."
        ),
        examples=("METRICS_SECRET",),
    ),
)

_TLS = Section(
    "a mapping such as {certificate: server.pem, key: server.key}",
    (
        Field(
            key="certificate",
            kind=values.PATH,
            about="The server's certificate, PEM, with those between it and the root.",
            examples=("server.pem",),
            required=True,
        ),
        Field(
            key="key",
            kind=values.PATH,
            about="The key of the certificate, PEM, without a password.",
            examples=("server.key",),
            required=True,
        ),
        Field(
            key="client_ca",
            kind=values.PATH,
            about=(
                "The root of the clients' certificates, PEM. With it, only clients "
                "that have such a certificate get any answer."
            ),
            examples=("clients.pem",),
        ),
    ),
)

METRICS = Section(
    'a mapping such as {listen: "127.0.0.1:9464"}',
    (
        Field(
            key="listen",
            kind=OneOf((Choice({"none": None}), values.LISTEN)),
            about=(
                "The address where Prometheus can scrape the metrics. Port 0 takes "
                "any free port; `none` opens none."
            ),
            default="127.0.0.1:9464",
            examples=("0.0.0.0:9464", "none"),
        ),
        Field(
            key="port_taken",
            kind=choice("next", "error"),
            about=(
                "What happens where that port is taken: `next` takes the next one that "
                "is free, of 20; `error` ends oomrun before anything runs, as it then "
                "does wherever the address cannot be had."
            ),
            default="next",
            examples=("error",),
        ),
        Field(
            key="tls",
            kind=_TLS,
            about="Serve https alone.",
            examples=({"certificate": "server.pem", "key": "server.key"},),
        ),
        Field(
            key="token",
            kind=Section("a mapping such as {file: PATH} or {env: NAME}", _SECRET),
            about=(
                "Answer scrapes only with this bearer token. `/healthz` and `/readyz` "
                "stay open. Use it with `tls`: the token is sent as it is."
            ),
            examples=({"file": "secrets/metrics"},),
        ),
        Field(
            key="basic_auth",
            kind=Section(
                "a mapping such as {user: prometheus, password: {file: PATH}}",
                (
                    Field(
                        key="user",
                        kind=values.USER,
                        about="The user's name.",
                        examples=("prometheus",),
                        required=True,
                    ),
                    Field(
                        key="password",
                        kind=Section(
                            "a mapping such as {file: PATH} or {env: NAME}", _SECRET
                        ),
                        about="The user's password.",
                        examples=({"env": "METRICS_PASSWORD"},),
                        required=True,
                    ),
                ),
            ),
            about="The same with a user and a password instead of a token.",
            examples=({"user": "prometheus", "password": {"env": "METRICS_PASSWORD"}},),
        ),
        Field(
            key="textfile",
            kind=values.PATH,
            about=(
                "A file for node_exporter's textfile collector, written anew every 15 "
                "seconds and at the end of the run; it stays. Its name must end in "
                "`.prom`, and no other run may have the same."
            ),
            examples=("/var/lib/node_exporter/oomrun.prom",),
        ),
        Field(
            key="pushgateway",
            kind=values.URL,
            about=(
                "A Prometheus Pushgateway that is told how the run stood at its end, "
                "once. It keeps that until somebody deletes it."
            ),
            examples=("http://gateway:9091",),
        ),
    ),
)
