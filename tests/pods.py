"""A pod played on this machine: its folders laid out, its command run as it is."""

from __future__ import annotations

import base64
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jobs

from oomrun.core.kubernetes_spec import JOB_FILE, JOB_FOLDER

JOB = f"{JOB_FOLDER}/{JOB_FILE}"


class Pod:
    """One container's folders, as the manifest says, below a folder of the test.

    Args:
        folder: where they are.
        objects: what ``oomrun render`` prints.
        index: which of the Job's pods it is.
        workspace: a volume that other pods have, too; None: its own.
        names: addresses by the names that the cluster's DNS would know.
    """

    def __init__(
        self,
        folder: Path,
        objects: list[dict[str, Any]],
        *,
        index: int = 0,
        workspace: Path | None = None,
        names: Mapping[str, str] | None = None,
    ) -> None:
        self.root, self.index, self._names = folder, index, dict(names or {})
        by_kind = {each["kind"]: each for each in objects}
        self.spec = by_kind["Job"]["spec"]["template"]["spec"]
        (self.container,) = self.spec["containers"]
        self.workspace = self.at("/workspace")
        if workspace is None:
            self.workspace.mkdir(parents=True, exist_ok=True)
        elif not self.workspace.exists():
            self.root.mkdir(parents=True, exist_ok=True)
            self.workspace.symlink_to(workspace)
        for mount in self.container["volumeMounts"]:
            if mount["name"] == "job":
                self._lay_out(by_kind["ConfigMap"], self.at(mount["mountPath"]))

    def at(self, path: str) -> Path:
        """Where a path of the container is here."""
        return self.root / path.lstrip("/")

    def _lay_out(self, config: dict[str, Any], folder: Path) -> None:
        """Links into a hidden folder, which is how a kubelet does it."""
        (volume,) = [each for each in self.spec["volumes"] if each["name"] == "job"]
        for item in volume["configMap"]["items"]:
            path = folder / "..data" / item["path"]
            path.parent.mkdir(parents=True, exist_ok=True)
            key = item["key"]
            if key in config["data"]:
                content = config["data"][key].encode()
            else:
                content = base64.b64decode(config["binaryData"][key])
            if path.exists():
                path.chmod(0o644)
            path.write_bytes(content)
            path.chmod(item["mode"])
            top = item["path"].split("/")[0]
            if not (folder / top).is_symlink():
                (folder / top).symlink_to(Path("..data") / top)

    def variables(self) -> dict[str, str]:
        """Those of the manifest, as the kubelet fills them in."""
        found = {}
        for each in self.container["env"]:
            if "value" in each:
                found[each["name"]] = each["value"].replace("$$", "$")
            else:
                field = each["valueFrom"]["fieldRef"]["fieldPath"]
                assert field.endswith("['batch.kubernetes.io/job-completion-index']")
                found[each["name"]] = str(self.index)
        # A container sees the folders under their own names; a process here does not.
        return {
            name: str(self.at(value)) if value.startswith("/") else value
            for name, value in found.items()
        }

    def words(self) -> list[str]:
        """The command, as the kubelet fills it in."""
        known = self.variables()

        def filled(match: re.Match[str]) -> str:
            if match[0] == "$$":
                return "$"
            return known.get(match[1], match[0])

        words = [
            re.sub(r"\$\$|\$\(([A-Za-z_][A-Za-z0-9_]*)\)", filled, word)
            for word in self.container["command"]
        ]
        assert words[0] == "oomrun"
        words = [str(self.at(word)) if word == JOB else word for word in words]
        if "--meet" in words:
            at = words.index("--meet") + 1
            name, _, port = words[at].rpartition(":")
            words[at] = f"{self._names[name]}:{port}"
        return words

    def start(self, env: Mapping[str, str]) -> subprocess.Popen[bytes]:
        """Its process, with further variables such as those of a Secret."""
        with open(self.root / "said", "ab") as said:
            return subprocess.Popen(
                [sys.executable, "-m", *self.words()],
                cwd=self.at(self.container["workingDir"]),
                env={**jobs.environment(), **self.variables(), **env},
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=said,
                start_new_session=True,
            )

    def said(self) -> str:
        """What ``kubectl logs`` would show."""
        return (self.root / "said").read_text()
