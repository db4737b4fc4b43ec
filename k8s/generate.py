"""Writes ``k8s/base``, ``overlays`` and ``watch``: the quickstart as it is rendered.

The base runs on a CPU. An overlay is what else ``oomrun render`` would print, as
patches of the base and further objects. ``watch`` submits the base and watches it.
``python k8s/generate.py`` after a change; a test compares.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from oomrun.cli import main
from oomrun.kubernetes import writing

HERE = Path(__file__).parent
JOB = HERE.parent / "configs" / "quickstart" / "job.yaml"
_IMAGE = "image: oomrun:0.1.0"
_GPU = f"{_IMAGE}, cpu: 8, memory: 32GiB, gpu_memory: any"
_OWN = "volume: {size: 1GiB}"
_SHARED = "volume: {size: 1GiB, access: ReadWriteMany}"
BASE = (f"kubernetes={{{_IMAGE}, cpu: 2, memory: 4GiB, {_OWN}}}",)
_WATCHED = f"{_IMAGE}, namespace: default, cpu: 2, memory: 4GiB, memory_max: 16GiB"
WATCH = (f"kubernetes={{{_WATCHED}, {_OWN}}}",)
#: By name what ``--set`` is given.
OVERLAYS = {
    "single-gpu": ("devices=gpu", f"kubernetes={{{_GPU}, gpus: 1, {_OWN}}}"),
    "multi-gpu-node": (
        "devices=gpu",
        "strategy=horovod",
        f"kubernetes={{{_GPU}, gpus: 4, shm: 8GiB, {_OWN}}}",
    ),
    "multi-node-horovod": (
        "devices=gpu",
        "strategy=horovod",
        f"kubernetes={{{_GPU}, pods: 2, gpus: 4, shm: 8GiB, {_SHARED}}}",
    ),
    "mig": (
        "devices=gpu",
        f"kubernetes={{{_GPU}, gpus: 1, gpu_resource: nvidia.com/mig-3g.40gb, {_OWN}}}",
    ),
    "kueue": (
        "devices=gpu",
        f"kubernetes={{{_GPU}, gpus: 1, queue: training, {_OWN}}}",
    ),
}

Manifest = dict[str, Any]


def rendered(settings: tuple[str, ...], *more: str) -> list[Manifest]:
    """What ``oomrun render`` prints of the quickstart with these settings."""
    options = [word for setting in settings for word in ("--set", setting)]
    with contextlib.redirect_stdout(io.StringIO()) as out:
        code = main(["render", str(JOB), "--json", *options, *more])
    if code:
        raise SystemExit(code)
    items: list[Manifest] = json.loads(out.getvalue())["items"]
    return items


def generate(folder: Path) -> None:
    """Writes everything below the folder."""
    base = rendered(BASE)
    _write(folder / "base", _named(base), {})
    _write(folder / "watch", _named(rendered(WATCH, "--watch")), {})
    for name, settings in OVERLAYS.items():
        files: dict[str, Any] = {}
        patches, before = [], {_key(each): each for each in base}
        for manifest in rendered(settings):
            was = before.pop(_key(manifest), None)
            kind = manifest["kind"].lower()
            if was is None:
                files[f"{kind}.yaml"] = manifest
                continue
            changes = list(_changes(was, manifest, ""))
            if changes:
                files[f"{kind}-patch.yaml"] = changes
                target = {
                    "kind": manifest["kind"],
                    "name": manifest["metadata"]["name"],
                }
                patches.append({"path": f"{kind}-patch.yaml", "target": target})
        assert not before, f"{name}: {list(before)} would have to go"
        added = [file for file in files if not file.endswith("-patch.yaml")]
        whole = {"resources": ["../../base", *added], "patches": patches}
        _write(folder / "overlays" / name, files, whole)


def _key(manifest: Manifest) -> tuple[str, str]:
    return manifest["kind"], manifest["metadata"]["name"]


def _named(manifests: list[Manifest]) -> dict[str, Any]:
    return {f"{each['kind'].lower()}.yaml": each for each in manifests}


def _changes(was: Any, now: Any, path: str) -> Iterator[dict[str, Any]]:
    """One object into another, as JSON Patch has it."""
    if isinstance(was, list) and isinstance(now, list) and len(was) == len(now):
        for index, (one, other) in enumerate(zip(was, now, strict=True)):
            yield from _changes(one, other, f"{path}/{index}")
        return
    if not (isinstance(was, dict) and isinstance(now, dict)):
        if was != now:
            yield {"op": "replace", "path": path, "value": now}
        return
    for key in {**was, **now}:
        at = f"{path}/{key.replace('~', '~0').replace('/', '~1')}"
        if key not in now:
            yield {"op": "remove", "path": at}
        elif key not in was:
            yield {"op": "add", "path": at, "value": now[key]}
        else:
            yield from _changes(was[key], now[key], at)


def _write(folder: Path, files: dict[str, Any], kustomization: Manifest) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    whole = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        **(kustomization or {"resources": list(files)}),
    }
    for name, content in {**files, "kustomization.yaml": whole}.items():
        (folder / name).write_text(writing.document(content), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(generate(HERE))
