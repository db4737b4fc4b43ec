"""Mutated job files: none may end in a traceback, and every error must name a line.

    python benchmarks/mutate.py [--files 100000] [--seed 0]

prints JSON: files, tracebacks, valid, invalid, errors_without_line, seconds, and the
first files that failed, as Python literals. Exit code 1 if anything failed.
"""

import argparse
import json
import random
import sys
import time
from collections.abc import Callable, Iterator

from oomrun.core import jobfile
from oomrun.core.errors import Problem, SpecError

ENVIRONMENT = {"DATA": "/data", "EMPTY": "", "BRACES": "{x}${DATA}"}

CORPUS = (
    "name: digits\nscript: train.py\n",
    """\
name: digits-cnn
script: train.py              # a comment
args: ["--epochs", "5"]
env: {DATA_DIR: /data/digits, N: 5, HERE: "${DATA:-/x}"}
strategy: auto
devices: auto
batch:
  global: 256
  micro: auto
memory:
  mode: growth
  limit: auto
  reserve: auto
  headroom: 8%
recovery:
  in_process: auto
  levers: [micro_batch, allocator, mixed_precision]
  max_restarts: {oom: 10, crash: 3, preemption: unlimited, hang: 3}
  grow_back: false
checkpoint: {dir: "runs/{name}", every: 500 steps, keep: 3}
metrics: {listen: "127.0.0.1:9464"}
kubernetes: {image: registry/train:1, gpus: 4, memory: 32Gi}
""",
    """\
name: limited
module: package.train
args:
  - --lr
  - 1e-3
  - '${DATA}'
devices: {cpu: 1, memory: [600MiB]}
batch: {micro: {max: 64}}
memory:
  headroom: 32MiB
recovery:
  levers:
    - micro_batch
checkpoint:
  every: 1h30min
metrics:
  listen: none
""",
    """\
name: on-a-cluster
script: train.py
kubernetes:
  image: registry.local:5000/team/train:1
  namespace: team-a
  gpu_resource: nvidia.com/mig-3g.40gb
  gpu_memory: 24GiB
  cpu: 500m
  memory: 32Gi
  shm: 2GiB
  volume: {size: 100GiB, storage_class: fast, access: ReadWriteMany}
  mounts: {/data: datasets}
  files: [model.py, data/words.txt]
  secrets: [wandb]
  node_selector: {nvidia.com/gpu.product: H100}
  tolerations: [dedicated=training:NoSchedule, spot]
  labels: {team: vision}
  annotations: {sidecar.istio.io/inject: "false"}
  grace: 10min
  deadline: 3d
  pod_monitor: {release: prometheus}
""",
    '{"name": "json", "script": "a/b.py", "devices": [0], "memory": {"limit": "90%"}}',
)

_TOKENS = (
    *("on", "off", "yes", "012", "0o17", "0b1", "1_000", "1:30", "2026-01-02", ".inf"),
    *(".nan", "~", "null", "true", "", "-1", "0", "1e999", "1.5", "9" * 30, "9" * 5000),
    *("auto", "unlimited", "20GiB", "120%", "8%", "10min", "5 steps", "gs://x", "<<"),
    *("[]", "{}", "[[]]", "{a: b}", "[a, {b: [c]}]", "*a", "&a x", "!!str x", "!x y"),
    *("!!python/object/apply:os.system [x]", "${DATA}", "${NO}", "${", "${A:-${B}}"),
    *("${BRACES}", "{name}", "{x}", "'", '"', '"\\0"', '"\\ud800"', '"\\UFFFFFFFF"'),
    *("|", ">-", "|9", "%", "@", "`", "?", "? x", "- ", ": ", "#", ",", "---", "..."),
    *("%YAML 9.9", "%TAG ! x", "\t", "\r", "\0", "\x1b", "\x85", "\u2028", "\ufeff"),
    *(
        "\u00a0",
        "\u202e",
        "é",
        "字",
        "🙂",
        "\ud800",
        "name",
        "script",
        "memory",
        "micro",
    ),
)
_KEYS = (
    "name",
    "script",
    "args",
    "env",
    "batch",
    "memory",
    "checkpoint",
    "x",
    "5",
    "on",
)

Mutation = Callable[[random.Random, str], str | bytes]


def _flip_bytes(chance: random.Random, text: str) -> bytes:
    data = bytearray(text.encode("utf-8", "surrogatepass"))
    for _ in range(chance.randint(1, 4)):
        if data:
            data[chance.randrange(len(data))] = chance.randrange(256)
    return bytes(data)


def _cut(chance: random.Random, text: str) -> str:
    start, end = sorted(chance.randint(0, len(text)) for _ in range(2))
    return text[:start] if chance.random() < 0.3 else text[:start] + text[end:]


def _insert(chance: random.Random, text: str) -> str:
    at = chance.randint(0, len(text))
    return text[:at] + chance.choice(_TOKENS) + text[at:]


def _swap_value(chance: random.Random, text: str) -> str:
    """Put a token in the place of a value."""
    lines = text.split("\n")
    at = chance.randrange(len(lines))
    key, colon, _ = lines[at].partition(":")
    lines[at] = f"{key}{colon} {chance.choice(_TOKENS)}"
    return "\n".join(lines)


def _swap_word(chance: random.Random, text: str) -> str:
    words = text.split(" ")
    words[chance.randrange(len(words))] = chance.choice(_TOKENS)
    return " ".join(words)


def _line(chance: random.Random, text: str) -> str:
    """Delete, repeat or move a line."""
    lines = text.split("\n")
    line = lines.pop(chance.randrange(len(lines)))
    for _ in range(chance.randint(0, 2)):
        lines.insert(chance.randint(0, len(lines)), line)
    return "\n".join(lines)


def _indent(chance: random.Random, text: str) -> str:
    lines = text.split("\n")
    at = chance.randrange(len(lines))
    blank = chance.choice(["", " ", "   ", "\t", "\u00a0", " \t", " " * 300])
    lines[at] = blank + (lines[at].lstrip() if chance.random() < 0.5 else lines[at])
    return "\n".join(lines)


def _key(chance: random.Random, text: str) -> str:
    """Misspell or replace a key."""
    lines = text.split("\n")
    at = chance.randrange(len(lines))
    key, colon, rest = lines[at].partition(":")
    slips = [key[:-1], key + key[-1:], key.upper(), f'"{key}"', chance.choice(_KEYS)]
    lines[at] = chance.choice(slips) + colon + rest
    return "\n".join(lines)


def _nest(chance: random.Random, text: str) -> str:
    depth = chance.choice([2, 15, 17, 200, 3000])
    opening, closing = chance.choice(
        [("[", "]"), ("{a: ", "}"), ("- ", ""), ("? ", "")]
    )
    closing = closing * chance.choice([0, depth - 1, depth])
    return f"{text}env: {opening * depth}x{closing}\n"


def _aliases(chance: random.Random, text: str) -> str:
    levels = [f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]" for i in range(1, 20)]
    return chance.choice(
        [
            text + "a0: &a0 x\n" + "\n".join(levels),
            text + "env: &e {A: *e}\n",
            "&r\n" + text + "env: *r\n",
            text + "args: *nowhere\n",
            text + "env: {<<: [*a, *b]}\n",
        ]
    )


def _random_yaml(chance: random.Random, text: str) -> str:
    def node(depth: int) -> str:
        kind = chance.random() if depth else 1.0
        if kind < 0.3:
            return (
                f"[{', '.join(node(depth - 1) for _ in range(chance.randint(0, 3)))}]"
            )
        if kind < 0.6:
            inner = (
                f"{chance.choice(_KEYS)}: {node(depth - 1)}"
                for _ in range(chance.randint(0, 3))
            )
            return f"{{{', '.join(inner)}}}"
        return chance.choice(_TOKENS)

    return "".join(f"{key}: {node(3)}\n" for key in chance.sample(_KEYS, 5))


def _noise(chance: random.Random, text: str) -> bytes:
    return chance.randbytes(chance.randint(0, 200))


MUTATIONS: tuple[Mutation, ...] = (
    _flip_bytes,
    _cut,
    _insert,
    _swap_value,
    _swap_value,
    _swap_word,
    _line,
    _indent,
    _key,
    _nest,
    _aliases,
    _random_yaml,
    _noise,
)


def mutated(chance: random.Random) -> bytes:
    """One mutated job file."""
    result: str | bytes = chance.choice(CORPUS)
    for _ in range(chance.choice([1, 1, 2, 3])):
        if isinstance(result, str):
            result = chance.choice(MUTATIONS)(chance, result)
    if isinstance(result, str):
        return result.encode("utf-8", "surrogatepass")
    return result


def overrides(chance: random.Random) -> list[str]:
    """Now and then, some ``--set`` arguments."""
    if chance.random() < 0.8:
        return []
    paths = ("memory.headroom", "batch.micro.max", "args", "env.A", "x.y", "", "a[0]")
    equals = chance.choice(["=", "=", "=", ""])
    return [
        f"{chance.choice(paths)}{equals}{chance.choice(_TOKENS)}"
        for _ in range(chance.randint(1, 3))
    ]


def examine(data: bytes, changes: list[str]) -> tuple[Problem, ...]:
    """The problems of a file, as ``oomrun validate`` finds them."""
    try:
        text = jobfile.decode(data, filename="job.yaml")
    except SpecError as error:
        return error.problems
    return jobfile.examine(
        text, filename="job.yaml", overrides=changes, environment=ENVIRONMENT
    ).problems


def located(problem: Problem, data: bytes) -> bool:
    """Whether a problem names a file, a column and a line that the file has."""
    last = data.count(b"\n") + data.count(b"\r") + 1
    named = problem.file in ("job.yaml", "--set") and bool(problem.message)
    in_file = problem.file == "--set" or problem.line <= last
    return named and in_file and problem.line >= 1 and problem.column >= 1


def cases(files: int, seed: int) -> Iterator[tuple[bytes, list[str]]]:
    """Mutated files with their overrides; the same for the same seed."""
    chance = random.Random(seed)
    for _ in range(files):
        yield mutated(chance), overrides(chance)


def run(files: int, seed: int) -> dict[str, object]:
    """Examine mutated files and count what became of them."""
    counts = {"tracebacks": 0, "valid": 0, "invalid": 0, "errors_without_line": 0}
    failed: list[str] = []
    started = time.perf_counter()
    for data, changes in cases(files, seed):
        try:
            problems = examine(data, changes)
        except Exception as error:
            counts["tracebacks"] += 1
            failed.append(f"{type(error).__name__}: {error}: {data!r} {changes!r}")
            continue
        counts["invalid" if problems else "valid"] += 1
        lost = [each for each in problems if not located(each, data)]
        counts["errors_without_line"] += len(lost)
        failed.extend(f"{each!r}: {data!r} {changes!r}" for each in lost)
    seconds = round(time.perf_counter() - started, 1)
    return {"files": files, **counts, "seconds": seconds, "failed": failed[:5]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--files", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    result = run(args.files, args.seed)
    print(json.dumps(result, indent=2))
    return 1 if result["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
