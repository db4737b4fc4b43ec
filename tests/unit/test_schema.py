"""The JSON Schema agrees with ``validate``, as far as a schema can."""

import argparse
import json

import jsonschema
import pytest
import yaml

from oomrun.cli import jobfile_commands
from oomrun.core import jobfile
from oomrun.core.jobfile.jsonschema import schema

FRAME = "name: digits\nscript: train.py\n"

VALID = [
    "strategy: horovod\ndevices: {cpu: 2, memory: [600MiB, 200MiB]}",
    "strategy: horovod\ndevices: [0, 2]",
    "strategy: multi_worker_mirrored\ndevices: {cpu: 2}",
    "",
    "args: [--epochs, 5, 1.5]",
    "env: {A: b, B: 1}",
    "strategy: single",
    "devices: cpu",
    "devices: [0]",
    "devices: [GPU-8f6d9a3c]",
    "devices: {cpu: 1, memory: 600MiB}",
    "devices: {cpu: 1, memory: [600MiB]}",
    "batch: {global: 256, micro: 32}",
    "batch: {micro: {max: 64}}",
    "memory: {mode: limit, limit: 90%, reserve: 1GiB, headroom: 512 MB}",
    "memory: {limit: [20GiB]}",
    "recovery: {in_process: never, levers: []}",
    "recovery: {max_restarts: {oom: unlimited, hang: 0}}",
    "recovery: {levers: [micro_batch], grow_back: false}",
    "recovery: {levers: [recompute, micro_batch, mixed_precision, allocator]}",
    "recovery: {levers: [micro_batch, fewer_devices]}",
    "recovery: {hang_after: 20min}",
    "recovery: {hang_after: never}",
    "checkpoint: {dir: 'runs/{name}', every: 500 steps, keep: 3}",
    "checkpoint: {every: 1h30min}",
    "metrics: {listen: '127.0.0.1:0'}",
    "metrics: {listen: none}",
    "metrics: {tls: {certificate: a, key: b, client_ca: c}, token: {env: A}}",
    "metrics: {basic_auth: {user: a, password: {file: x}}, textfile: x.prom}",
    "metrics: {pushgateway: 'http://gateway:9091'}",
    "kubernetes: {image: x}",
    "kubernetes: {image: 'r.io:5000/a/b:1@sha256:%s'}" % ("0" * 64),
    "kubernetes: {image: x, memory: 32Gi, cpu: 500m, shm: 1.5 GB}",
    "kubernetes: {image: x, volume: {size: 1GiB}, mounts: {/data/a: b.c}}",
    "kubernetes: {image: x, tolerations: [a, 'a.b/c=d:NoExecute', 'a:NoSchedule']}",
    "kubernetes: {image: x, gpu_memory: any, gpu_resource: nvidia.com/mig-1g.10gb}",
    "kubernetes: {image: x, labels: {}, pod_monitor: {}, files: [a/b.txt]}",
]

WRONG = [
    "nmae: x",
    "module: x",
    "args: x",
    "args: [true]",
    "args: [[a]]",
    "env: {A-B: x}",
    "env: {A: true}",
    "strategy: best",
    "devices: tpu",
    "devices: []",
    "devices: [-1]",
    "devices: {memory: 1GB}",
    "batch: {global: 0}",
    "batch: {micro: {}}",
    "batch: {micro: {max: 0}}",
    "memory: {mode: grow}",
    "memory: {limit: 20}",
    "memory: {limit: 20G}",
    "memory: {headroom: 120%}",
    "memory: {headroom: 100%}",
    "memory: {reserve: 5%}",
    "recovery: {levers: [fewer_device]}",
    "recovery: {levers: [micro_batch, micro_batch]}",
    "recovery: {max_restarts: {oom: -1}}",
    "recovery: {max_restarts: 5}",
    "checkpoint: {every: 500}",
    "checkpoint: {every: 10m}",
    "checkpoint: {keep: 0}",
    "checkpoint: {dir: 'gcs://bucket'}",
    "metrics: {listen: 9464}",
    "metrics: {token: x}",
    "metrics: {tls: {certificate: x}}",
    "metrics: {basic_auth: {user: 'a:b', password: {file: x}}}",
    "metrics: {pushgateway: 'http://a:b@x'}",
    "kubernetes: {}",
    "kubernetes: {image: X}",
    "kubernetes: {image: x, pods: 0}",
    "kubernetes: {image: x, mode: deployment}",
    "kubernetes: {image: x, memory: 8}",
    "kubernetes: {image: x, memory: 8G}",
    "kubernetes: {image: x, cpu: 1Gi}",
    "kubernetes: {image: x, user: 0}",
    "kubernetes: {image: x, gpu_resource: amd.com/gpu}",
    "kubernetes: {image: x, tolerations: ['a:Never']}",
    "kubernetes: {image: x, labels: {a b: c}}",
    "kubernetes: {image: x, labels: {a: b c}}",
    "kubernetes: {image: x, mounts: {data: datasets}}",
    "kubernetes: {image: x, files: [../secret]}",
    "batch:",
    "name: [x]",
]


@pytest.fixture(scope="module")
def validator() -> jsonschema.Draft202012Validator:
    jsonschema.Draft202012Validator.check_schema(schema())
    return jsonschema.Draft202012Validator(schema())


def valid(text: str) -> bool:
    examined = jobfile.examine(text, filename="job.yaml", environment={})
    return examined.spec is not None


@pytest.mark.parametrize("keys", VALID)
def test_valid_files(validator: jsonschema.Draft202012Validator, keys: str) -> None:
    assert valid(FRAME + keys)
    validator.validate(yaml.safe_load(FRAME + keys))


@pytest.mark.parametrize("keys", WRONG)
def test_wrong_files(validator: jsonschema.Draft202012Validator, keys: str) -> None:
    assert not valid(FRAME + keys)
    assert not validator.is_valid(yaml.safe_load(FRAME + keys))


@pytest.mark.parametrize(
    "text",
    [
        "script: x.py",
        "name: x",
        "name: X Y\nscript: x.py",
        "[]",
        "name: x\ncommand: []",
        "name: x\ncommand: x",
        "name: x\ncommand: [x]\nscript: x.py",
    ],
)
def test_wrong_frames(validator: jsonschema.Draft202012Validator, text: str) -> None:
    assert not valid(text)
    assert not validator.is_valid(yaml.safe_load(text))


@pytest.mark.parametrize("program", ["script: x.py", "module: x", "command: [x, 1]"])
def test_frames(validator: jsonschema.Draft202012Validator, program: str) -> None:
    text = f"name: x\n{program}\n"
    assert valid(text)
    validator.validate(yaml.safe_load(text))


def test_every_key_is_described(validator: jsonschema.Draft202012Validator) -> None:
    def walk(node: object) -> None:
        if isinstance(node, dict):
            for key in node.get("properties", {}).values():
                assert key["description"]
            for each in node.values():
                walk(each)
        elif isinstance(node, list):
            for each in node:
                walk(each)

    walk(validator.schema)


def test_the_command_prints_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert jobfile_commands.schema(argparse.Namespace()) == 0
    assert json.loads(capsys.readouterr().out) == schema()
