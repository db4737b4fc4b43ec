"""``oomrun render`` and ``oomrun lint`` by the command line."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

import kubernetes_jobs as jobs
from oomrun.cli import main
from oomrun.core import events as ev
from oomrun.core import jobfile
from oomrun.core.spec import mathematics
from oomrun.core.units import format_bytes
from oomrun.journal import Journal
from oomrun.kubernetes.gpu_memory import gpu_need
from oomrun.rundir import RunDir
from programs import kubectl, needs_kubectl
from scenarios import state_measured

K8S = Path(__file__).parents[2] / "k8s"
SECTION = "kubernetes: {image: x, volume: {size: 1GiB}, gpu_memory: any}"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def printed(capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(capsys.readouterr().out))


def test_render_prints_yaml(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    jobs.write_job(folder, SECTION)
    assert main(["render", "job.yaml"]) == 0
    kinds = [each["kind"] for each in printed(capsys)]
    assert kinds == [
        "ServiceAccount", "ConfigMap", "PersistentVolumeClaim", "NetworkPolicy", "Job",
    ]  # fmt: skip
    assert main(["render", "job.yaml", "--json"]) == 0
    whole = json.loads(capsys.readouterr().out)
    assert [each["kind"] for each in whole["items"]] == kinds


def test_render_needs_the_section_and_the_script(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    jobs.write_job(folder, "")
    assert main(["render", "job.yaml"]) == 2
    assert "job.yaml:1:1: expected the key kubernetes" in capsys.readouterr().err
    jobs.write_job(folder, SECTION)
    (folder / "train.py").unlink()
    assert main(["render", "job.yaml"]) == 2
    assert "job.yaml:2:9: script: cannot read train.py" in capsys.readouterr().err


@pytest.mark.parametrize("script", ["../train.py", "a b.py", "$(id).py"])
def test_scripts_that_cannot_go_along(
    folder: Path, capsys: pytest.CaptureFixture[str], script: str
) -> None:
    frame = f"name: digits\nscript: {json.dumps(script)}\n"
    jobs.write_job(folder, SECTION, frame)
    assert main(["render", "job.yaml"]) == 2
    assert "script: expected a file below the folder" in capsys.readouterr().err


def test_programs_of_the_image_do_not_go_along(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for program in ("script: /opt/train.py", "module: pkg.train", "command: [make]"):
        jobs.write_job(folder, SECTION, f"name: digits\n{program}\n")
        assert main(["render", "job.yaml"]) == 0
        (config,) = [e for e in printed(capsys) if e["kind"] == "ConfigMap"]
        assert list(config["data"]) == ["job.yaml"]


def test_variables_are_left_to_the_pod(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that what is secret here does not go into a ConfigMap."""
    monkeypatch.setenv("HF_TOKEN", "very-secret")
    more = "env: {HF_TOKEN: '${HF_TOKEN}', B: '${ONLY_THERE}'}\nargs: ['${HF_TOKEN}']\n"
    jobs.write_job(folder, more + SECTION)
    assert main(["render", "job.yaml"]) == 0
    out = capsys.readouterr().out
    assert "very-secret" not in out
    assert "${ONLY_THERE}" in out


def test_a_secret_in_the_file_is_refused(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    jobs.write_job(folder, "env: {HF_TOKEN: abc}\n" + SECTION)
    assert main(["render", "job.yaml"]) == 2
    said = capsys.readouterr()
    assert "job.yaml:3:17: env.HF_TOKEN: looks like a secret" in said.err
    assert said.out == ""


def test_files_that_are_too_large_together(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "big.bin").write_bytes(bytes(2**20))
    jobs.write_job(folder, SECTION.replace("x,", "x, files: [big.bin],"))
    assert main(["render", "job.yaml"]) == 2
    error = capsys.readouterr().err
    assert "a ConfigMap takes 1MiB" in error
    assert "big.bin has 1MiB: put it into the image or on a volume" in error


@pytest.mark.parametrize("version", ["1.28", "1.38", "new"])
def test_versions_that_nothing_was_checked_against(
    folder: Path, capsys: pytest.CaptureFixture[str], version: str
) -> None:
    jobs.write_job(folder, SECTION)
    assert main(["render", "job.yaml", "--kubernetes-version", version]) == 2
    assert "1.31" in (error := capsys.readouterr().err) or "from 1.29 to 1.37" in error


def test_what_is_rendered_passes_the_lint(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    jobs.write_job(folder, SECTION)
    assert main(["render", "job.yaml", "--output", "out"]) == 0
    assert main(["lint", "out", "--kubernetes-version", "1.29"]) == 0
    assert "5 objects, nothing found" in capsys.readouterr().out
    names = yaml.safe_load((folder / "out/kustomization.yaml").read_text())["resources"]
    assert {path.name for path in (folder / "out").iterdir()} == {
        *names, "kustomization.yaml",
    }  # fmt: skip


def test_lint_says_where(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    jobs.write_job(folder, SECTION)
    main(["render", "job.yaml", "--output", "out"])
    job = folder / "out/job.yaml"
    text = job.read_text().replace("restartPolicy: Never", "restartPolicy: Bogus")
    job.write_text(text.replace("memory: 16Gi", "memory: 8Gib").replace(
        'memory: "16Gi"', 'memory: "8Gib"', 1))  # fmt: skip
    capsys.readouterr()
    assert main(["lint", str(job)]) == 2
    error = capsys.readouterr().err
    line = text[: text.index("restartPolicy")].count("\n") + 1
    assert f"{job}:{line}:22: Job digits: spec.template.spec.restartPolicy" in error
    assert "got 8Gib (did you mean 8Gi?)" in error
    assert main(["lint", str(job), "--json"]) == 2
    found = json.loads(capsys.readouterr().out)
    assert found["valid"] is False
    assert {error["line"] for error in found["errors"]} >= {line}


@pytest.mark.parametrize(
    ("text", "said"),
    [("a: [", "f.yaml:1:5: it is no YAML"), ("", "there is no object in it")],
)
def test_lint_of_what_is_no_manifest(
    folder: Path, capsys: pytest.CaptureFixture[str], text: str, said: str
) -> None:
    (folder / "f.yaml").write_text(text)
    assert main(["lint", "f.yaml"]) == 2
    assert said in capsys.readouterr().err
    assert main(["lint", "nowhere.yaml"]) == 2
    assert "cannot be read: no such file" in capsys.readouterr().err
    (folder / "f.yaml").write_bytes(b"\xff")
    assert main(["lint", "f.yaml"]) == 2
    assert "is no UTF-8 text" in capsys.readouterr().err


def test_render_does_without_a_client_or_anything_heavy(folder: Path) -> None:
    jobs.write_job(folder, SECTION)
    code = "import sys; from oomrun.cli import main; main(['render', 'job.yaml']); "
    code += "print([n for n in ('kubernetes', 'tensorflow', 'numpy', 'rich') "
    code += "if n in sys.modules], file=sys.stderr)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stderr.splitlines()[-1] == "[]"


def test_the_committed_base_is_the_generated_one(folder: Path) -> None:
    runpy.run_path(str(K8S / "generate.py"))["generate"](folder)

    def below(root: Path) -> dict[str, str]:
        return {
            str(path.relative_to(root)): path.read_text()
            for part in ("base", "overlays", "watch")
            for path in (root / part).rglob("*.yaml")
        }

    assert below(folder) == below(K8S), "run: python k8s/generate.py"


GENERATE = runpy.run_path(str(K8S / "generate.py"))


def patched(value: Any, operations: list[dict[str, Any]]) -> Any:
    """The object after a JSON Patch."""
    for operation in operations:
        *keys, last = [
            key.replace("~1", "/").replace("~0", "~")
            for key in operation["path"].split("/")[1:]
        ]
        place = value
        for key in keys:
            place = place[int(key) if isinstance(place, list) else key]
        where = int(last) if isinstance(place, list) else last
        if operation["op"] == "remove":
            del place[where]
        else:
            assert (operation["op"] == "add") == (where not in place) or (
                isinstance(place, list)
            )
            place[where] = operation["value"]
    return value


def built_by_us(folder: Path) -> dict[str, Any]:
    """What kustomize makes of an overlay: its base, patched, and what it adds."""
    whole = yaml.safe_load((folder / "kustomization.yaml").read_text())
    base = folder / whole["resources"][0]
    names = yaml.safe_load((base / "kustomization.yaml").read_text())["resources"]
    files = [base / name for name in names]
    files += [folder / name for name in whole["resources"][1:]]
    found = {
        each["kind"]: each for each in map(yaml.safe_load, map(Path.read_text, files))
    }
    for patch in whole["patches"]:
        operations = yaml.safe_load((folder / patch["path"]).read_text())
        kind = patch["target"]["kind"]
        found[kind] = patched(found[kind], operations)
    return found


@pytest.mark.parametrize("name", GENERATE["OVERLAYS"])
def test_an_overlay_is_what_is_rendered(name: str) -> None:
    wanted = {
        each["kind"]: each for each in GENERATE["rendered"](GENERATE["OVERLAYS"][name])
    }
    assert built_by_us(K8S / "overlays" / name) == wanted
    for manifest in wanted.values():
        for version in jobs.VERSIONS:
            jobs.check_schema(manifest, version)
    assert main(["lint", str(K8S / "base")]) == 0


@needs_kubectl
@pytest.mark.parametrize("name", GENERATE["OVERLAYS"])
def test_kubectl_builds_each_overlay(name: str) -> None:
    folder = str(K8S / "overlays" / name)
    built = {
        each["kind"]: each for each in yaml.safe_load_all(kubectl("kustomize", folder))
    }
    wanted = GENERATE["rendered"](GENERATE["OVERLAYS"][name])
    assert built == {each["kind"]: each for each in wanted}


def test_a_run_here_says_how_large_the_gpu_must_be(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    more = "env: {A: '${A:-b}'}\n"
    path = jobs.write_job(folder, more + SECTION.replace("any", "auto"))
    assert main(["render", "job.yaml"]) == 0
    said = capsys.readouterr()
    assert "so any GPU is taken" in said.err
    assert "affinity" not in said.out
    spec = jobfile.load(path.read_text(), filename="x", environment={})
    run = RunDir(folder / "runs/digits")
    run.create()
    with Journal(run.journal) as journal:
        journal.append(
            ev.RunStarted(
                at=0.0, run_id="r", name="digits", version="0", seed=1,
                mathematics=mathematics(spec),
            )
        )  # fmt: skip
        journal.append(ev.AttemptStarted(at=0.0, attempt=1, plan={}))
        journal.append(state_measured())
    assert main(["render", "job.yaml", "--json"]) == 0
    said = capsys.readouterr()
    need = gpu_need(spec, state_measured())
    assert need is not None
    assert f"GPUs with {format_bytes(need.least_bytes)} are asked for" in said.err
    objects = {each["kind"]: each for each in json.loads(said.out)["items"]}
    affinity = jobs.pod_of(objects)["affinity"]["nodeAffinity"]
    (term,) = affinity["requiredDuringSchedulingIgnoredDuringExecution"][
        "nodeSelectorTerms"
    ]
    values = term["matchExpressions"][0]["values"]
    assert values == [str(need.least_bytes // 2**20 - 1)]
    # Another job's run says nothing of this one.
    again = ["--set", "env.A=c"]
    assert main(["render", "job.yaml", *again]) == 0
    assert "so any GPU is taken" in capsys.readouterr().err


@needs_kubectl
def test_kubectl_builds_the_base_and_the_watcher() -> None:
    for part, wanted in (
        ("base", GENERATE["rendered"](GENERATE["BASE"])),
        ("watch", GENERATE["rendered"](GENERATE["WATCH"], "--watch")),
    ):
        text = kubectl("kustomize", str(K8S / part))
        built = {each["kind"]: each for each in yaml.safe_load_all(text)}
        assert built == {each["kind"]: each for each in wanted}
        assert main(["lint", str(K8S / part)]) == 0


@needs_kubectl
def test_kubectl_builds_what_is_rendered(folder: Path) -> None:
    """Its parser of YAML is another one than ours."""
    hostile = {"annotations": {"a": "1e3", "b": "y", "c": "0o7", "d": "x: #\n- {"}}
    section = {"image": "x", **hostile, "labels": {"n": "n", "e": "1e3"}}
    jobs.write_job(folder, f"kubernetes: {json.dumps(section)}")
    assert main(["render", "job.yaml", "--output", "out"]) == 0
    built = {
        each["kind"]: each for each in yaml.safe_load_all(kubectl("kustomize", "out"))
    }
    for path in (folder / "out").glob("*.yaml"):
        ours = yaml.safe_load(path.read_text())
        if ours["kind"] != "Kustomization":
            assert built[ours["kind"]] == ours
