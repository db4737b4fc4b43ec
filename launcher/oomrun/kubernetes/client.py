"""A cluster through the official Python client.

Covers: connecting, and ``oomrun.kubernetes.cluster.Cluster`` by the client's methods.
Does not cover: what the objects say.

Objects are plain dictionaries on the way there and back: the client's own classes
differ between its versions, and know only the fields of their time.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from typing import Any

from oomrun.core import words
from oomrun.kubernetes.cluster import ClusterError, Manifest
from oomrun.kubernetes.submission import KINDS

__all__ = ["CUSTOM", "NAMESPACE_FILE", "Client", "connect"]

#: Where a pod is told its namespace.
NAMESPACE_FILE = "/var/run/secrets/kubernetes.io/serviceaccount/namespace"

_CONNECT_S, _READ_S = 10.0, 60.0
# A log may be silent for long, and the client wants a number.
_SILENT_S = 30 * 86_400.0
_KINDS = {
    "ServiceAccount": ("CoreV1Api", "service_account"),
    "ConfigMap": ("CoreV1Api", "config_map"),
    "PersistentVolumeClaim": ("CoreV1Api", "persistent_volume_claim"),
    "Pod": ("CoreV1Api", "pod"),
    "Service": ("CoreV1Api", "service"),
    "NetworkPolicy": ("NetworkingV1Api", "network_policy"),
    "Job": ("BatchV1Api", "job"),
}
#: Kinds of operators: group, version and plural.
CUSTOM = {
    "PodMonitor": ("monitoring.coreos.com", "v1", "podmonitors"),
    "JobSet": ("jobset.x-k8s.io", "v1alpha2", "jobsets"),
    "MPIJob": ("kubeflow.org", "v2beta1", "mpijobs"),
    "TrainJob": ("trainer.kubeflow.org", "v1alpha1", "trainjobs"),
    "TrainingRuntime": ("trainer.kubeflow.org", "v1alpha1", "trainingruntimes"),
}


def connect(context: str | None, namespace: str | None) -> Client:
    """The cluster that the kubeconfig or our pod leads to.

    Raises:
        ClusterError: there is no way to a cluster.
    """
    import kubernetes

    config = kubernetes.config
    settings = kubernetes.client.Configuration()
    settings.retries = False  # else urllib3 tries again, and says so on stderr
    # The client looks at the variable once, when it is imported.
    file = os.environ.get("KUBECONFIG") or None
    try:
        if context is None and _in_pod():
            config.load_incluster_config(client_configuration=settings)
            own: str | None = _read(NAMESPACE_FILE)
        else:
            config.load_kube_config(
                config_file=file, context=context, client_configuration=settings
            )
            own = _namespace_of(config.list_kube_config_contexts(file), context)
    except (config.ConfigException, OSError) as error:
        why = words.one_line(str(error), 300)
        raise ClusterError(
            f"there is no way to a cluster: {why}", hint="kubectl cluster-info"
        ) from None
    api = kubernetes.client.ApiClient(settings)
    return Client(api, namespace or own or "default")


def _in_pod() -> bool:
    here = "KUBERNETES_SERVICE_HOST" in os.environ and "KUBECONFIG" not in os.environ
    return here and os.path.exists(NAMESPACE_FILE)


def _read(path: str) -> str:
    with open(path, encoding="utf-8") as file:
        return file.read().strip()


def _namespace_of(listed: Any, context: str | None) -> str | None:
    contexts, active = listed
    chosen = active
    if context is not None:
        chosen = next(each for each in contexts if each["name"] == context)
    namespace = (chosen or {}).get("context", {}).get("namespace")
    return namespace if isinstance(namespace, str) else None


class Client:
    """One namespace of a cluster, by the official Python client."""

    def __init__(self, api: Any, namespace: str) -> None:
        self.namespace = namespace
        self._api = api

    def create(self, manifest: Manifest) -> bool:
        """Makes the object; False where one of the kind and name is there already."""
        kind, name = str(manifest["kind"]), str(manifest["metadata"]["name"])
        return self._call("create", kind, name, gone=409, body=manifest) is not None

    def read(self, kind: str, name: str) -> Manifest | None:
        """The object, or None where there is none."""
        return self._call("read", kind, name, name=name)

    def listed(self, kind: str, selector: Mapping[str, str]) -> list[Manifest]:
        """The objects with these labels."""
        labels = ",".join(f"{key}={value}" for key, value in selector.items())
        found = self._call("list", kind, "", label_selector=labels)
        return list((found or {}).get("items") or [])

    def delete(self, kind: str, name: str) -> bool:
        """Deletes it, a Job once its pods are gone; False where there is none."""
        # In the foreground others would be there until a controller comes by.
        policy = "Foreground" if kind in KINDS.values() else "Background"
        found = self._call("delete", kind, name, name=name, propagation_policy=policy)
        return found is not None

    def log(
        self, pod: str, *, follow: bool, since_s: int | None = None
    ) -> Iterator[bytes]:
        """What the pod has printed, in pieces.

        Args:
            pod: its name.
            follow: until the pod ends, or the connection.
            since_s: only what it has printed within so many seconds.
        """
        options: dict[str, Any] = {} if since_s is None else {"since_seconds": since_s}
        if follow:
            options["_request_timeout"] = (_CONNECT_S, _SILENT_S)
        response = self._response(
            "read", "Pod", "_log", pod, name=pod, follow=follow, **options
        )
        if response is None:
            return
        import urllib3

        try:
            yield from response.stream(4096)
        except urllib3.exceptions.HTTPError:
            return  # the connection was lost, and the pod goes on
        finally:
            response.close()

    def _call(
        self, verb: str, kind: str, what: str, *, gone: int = 404, **options: Any
    ) -> Manifest | None:
        response = self._response(verb, kind, "", what, gone=gone, **options)
        if response is None:
            return None
        found: Manifest = json.loads(response.data)
        return found

    def _response(
        self,
        verb: str,
        kind: str,
        suffix: str,
        what: str,
        *,
        gone: int = 404,
        **options: Any,
    ) -> Any:
        """The server's reply, or None where it says ``gone``."""
        import kubernetes
        import urllib3

        call = self._method(kubernetes.client, verb, kind, suffix)
        options.setdefault("_request_timeout", (_CONNECT_S, _READ_S))
        try:
            return call(namespace=self.namespace, _preload_content=False, **options)
        except kubernetes.client.ApiException as error:
            if error.status == gone:
                return None
            raise self._error(f"{verb} {kind} {what}".strip(), error) from None
        except (urllib3.exceptions.HTTPError, OSError) as error:
            why = words.one_line(str(getattr(error, "reason", None) or error), 300)
            raise ClusterError(
                f"the cluster cannot be reached: {why}",
                where=self._host(),
                may_pass=True,
            ) from None

    def _method(self, client: Any, verb: str, kind: str, suffix: str) -> Any:
        if kind in CUSTOM:
            return self._custom(client, verb, *CUSTOM[kind])
        api, name = _KINDS[kind]
        return getattr(
            getattr(client, api)(self._api), f"{verb}_namespaced_{name}{suffix}"
        )

    def _custom(
        self, client: Any, verb: str, group: str, version: str, plural: str
    ) -> Any:
        verb = "get" if verb == "read" else verb
        method = getattr(
            client.CustomObjectsApi(self._api), f"{verb}_namespaced_custom_object"
        )

        def call(**options: Any) -> Any:
            return method(group=group, version=version, plural=plural, **options)

        return call

    def _host(self) -> str:
        return str(self._api.configuration.host)

    def _error(self, what: str, error: Any) -> ClusterError:
        try:
            said = str(json.loads(error.body)["message"])
        except (TypeError, ValueError, KeyError):
            said = str(error.reason or "it does not say why")
        said = words.one_line(said, 500)
        hints = {
            401: "log in again", 403: "ask for the rights in this namespace",
        }  # fmt: skip
        return ClusterError(
            f"cannot {what}: {said} ({error.status})",
            where=self._host(),
            hint=hints.get(error.status),
            may_pass=error.status == 429 or (error.status or 0) >= 500,
        )
