"""The API server of a cluster, whichever client there is for it.

Covers: what can be asked of a cluster, choosing a client, and what goes wrong, as one
error for people. Does not cover: the clients (``client``, ``kubectl``), what the
objects say.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from oomrun.core.errors import PlatformError

__all__ = ["Cluster", "ClusterError", "connect"]

Manifest = dict[str, Any]


class ClusterError(PlatformError):
    """The cluster cannot be reached, or does not do what it was asked for.

    Attributes:
        may_pass: the same may well work in a minute.
    """

    def __init__(
        self,
        problem: str,
        *,
        where: str | None = None,
        hint: str | None = None,
        may_pass: bool = False,
    ) -> None:
        super().__init__(problem, where=where, hint=hint)
        self.may_pass = may_pass


class Cluster(Protocol):
    """One namespace of a cluster."""

    namespace: str

    def create(self, manifest: Manifest) -> bool:
        """Makes the object; False where one of the kind and name is there already."""
        ...

    def read(self, kind: str, name: str) -> Manifest | None:
        """The object, or None where there is none."""
        ...

    def listed(self, kind: str, selector: Mapping[str, str]) -> list[Manifest]:
        """The objects with these labels."""
        ...

    def delete(self, kind: str, name: str) -> bool:
        """Deletes it, a Job once its pods are gone; False where there is none."""
        ...

    def log(
        self, pod: str, *, follow: bool, since_s: int | None = None
    ) -> Iterator[bytes]:
        """What the pod has printed, in pieces.

        Args:
            pod: its name.
            follow: until the pod ends, or the connection.
            since_s: only what it has printed within so many seconds.
        """
        ...


def connect(context: str | None, namespace: str | None) -> Cluster:
    """The cluster that the client is set to: the Python client, else kubectl.

    Args:
        context: of the kubeconfig; None for the current one.
        namespace: None for that of the context.

    Raises:
        ClusterError: there is no client, or no way to a cluster.
    """
    from oomrun.kubernetes import client, kubectl

    try:
        import kubernetes  # noqa: F401
    except ImportError:
        program = shutil.which("kubectl")
        if program is not None:
            return kubectl.connect(program, context, namespace)
        raise ClusterError(
            "neither the Python client of Kubernetes nor kubectl is installed",
            hint="pip install 'oomrun[kubernetes]'",
        ) from None
    return client.connect(context, namespace)
