"""An object of a job with its name, namespace and labels, still without content."""

from __future__ import annotations

from typing import Any

from oomrun.kubernetes.submission import Submission

__all__ = ["Manifest", "made"]

Manifest = dict[str, Any]


def made(api: str, kind: str, submission: Submission, name: str = "") -> Manifest:
    """The object; its name is the job's unless another one is given."""
    metadata: Manifest = {"name": name or submission.name}
    if submission.section.namespace is not None:
        metadata["namespace"] = submission.section.namespace
    metadata["labels"] = dict(submission.labels)
    return {"apiVersion": api, "kind": kind, "metadata": metadata}
