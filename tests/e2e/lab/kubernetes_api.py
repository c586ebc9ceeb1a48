"""The part of Kubernetes' API that Spark's scheduler uses; a pod is a process of its own entry point on loopback.

Every request must be allowed by the rules of a Role, as the API server demands it. Pods have addresses of their own.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Self
from urllib.parse import parse_qs, urlsplit

from local.process import OwnedProcess

Object = dict[str, Any]
_STOP_TIMEOUT_S = 10.0
_VERBS = {"POST": "create", "PATCH": "patch", "PUT": "update"}
# The entry point starts everything below `tini -s --`, which only an image has.
_TINI = '#!/bin/sh\nshift 2\nexec "$@"\n'


class KubernetesApi:
    """An API server for one namespace. `used` has each verb and resource that was asked for.

    `refused` has those without a right. `entry_point` is the image's; `folders` stand for a pod's directories.
    """

    def __init__(
        self, directory: Path, entry_point: Path, rules: Sequence[Mapping[str, Any]], folders: Mapping[str, Path]
    ) -> None:
        self.allowed = {(verb, name) for rule in rules for name in rule["resources"] for verb in rule["verbs"]}
        self.used: set[tuple[str, str]] = set()
        self.refused: set[tuple[str, str]] = set()
        self.pods: dict[str, Object] = {}
        self.created: list[Object] = []
        self.intrude = False
        """Let a stranger follow the next pod: an executor that has another secret."""
        self.intruder: OwnedProcess | None = None
        self._directory = directory
        self._entry_point = entry_point
        self._folders = folders
        self._processes: dict[str, OwnedProcess] = {}
        self.ended = threading.Event()
        self._lock = threading.Lock()
        (tools := directory / "tools").mkdir()
        (tini := tools / "tini").write_text(_TINI)
        tini.chmod(0o755)
        handler = type("Handler", (_Handler,), {"api": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.ended.set()
        self._server.shutdown()
        self._server.server_close()
        for name in list(self._processes):
            self._stop(name)
        if self.intruder is not None:
            self.intruder.kill()

    @property
    def url(self) -> str:
        """For `--master k8s://…`."""
        return f"http://127.0.0.1:{self._server.server_port}"

    def answer(self, method: str, resource: str, name: str, query: Mapping[str, list[str]], body: bytes) -> Object:
        """Return the answer to a request; raises PermissionError, KeyError if there is no such object."""
        verb = _VERBS.get(method) or _verb(method, name, watched=query.get("watch") == ["true"])
        self.used.add((verb, resource))
        if (verb, resource) not in self.allowed:
            self.refused.add((verb, resource))
            raise PermissionError(f"cannot {verb} resource {resource}")
        with self._lock:
            if verb == "create":
                return self._create(json.loads(body))
            if verb == "get":
                return self.pods[name]
            if verb == "delete":
                return self._delete(name)
            selected = [one for one, pod in self.pods.items() if _matches(pod, query)]
            items = [self.pods[one] for one in selected]
            if verb == "deletecollection":
                for one in selected:
                    self._delete(one)
            return {"kind": "PodList", "apiVersion": "v1", "metadata": {"resourceVersion": "1"}, "items": items}

    def add(self, name: str) -> None:
        """Add a pod that runs already: the driver's."""
        metadata = {"name": name, "namespace": "n", "uid": f"uid-{name}", "resourceVersion": "1"}
        self.pods[name] = {"kind": "Pod", "apiVersion": "v1", "metadata": metadata, "spec": {"containers": []}}
        self.pods[name]["status"] = {"conditions": [{"type": "Ready", "status": "True"}]}

    def _create(self, pod: Object) -> Object:
        name = pod["metadata"]["name"]
        address = f"127.0.0.{len(self.created) + 2}"
        pod["metadata"] |= {"uid": f"uid-{name}", "resourceVersion": "1"}
        pod["status"] = {"phase": "Running", "podIP": address}
        self.created.append(pod)
        self.pods[name] = pod
        (container,) = pod["spec"]["containers"]
        environment = dict(os.environ)
        for one in container["env"]:
            environment[one["name"]] = self._value(one, address, name)
        environment["PATH"] = f"{self._directory / 'tools'}:{os.environ['PATH']}"
        self._processes[name] = self._run(name, container, environment)
        if self.intrude and self.intruder is None:
            other = {"SPARK_EXECUTOR_ID": "99", "_SPARK_AUTH_SECRET": "0" * 64}
            self.intruder = self._run("intruder", container, environment | other)
        return pod

    def _run(self, name: str, container: Object, environment: Mapping[str, str]) -> OwnedProcess:
        command = ["bash", self._entry_point, *container["args"]]
        return OwnedProcess(command, log=self._directory / f"{name}.log", env=environment, cwd=self._directory)

    def _value(self, variable: Object, address: str, name: str) -> str:
        if (source := variable.get("valueFrom")) is not None:
            return {"status.podIP": address, "metadata.name": name}[source["fieldRef"]["fieldPath"]]
        value = variable.get("value", "")
        return str(self._folders.get(value, value))

    def _delete(self, name: str) -> Object:
        pod = self.pods.pop(name)
        self._stop(name)
        return pod

    def _stop(self, name: str) -> None:
        if (process := self._processes.pop(name, None)) is not None:
            process.stop(_STOP_TIMEOUT_S)


def _verb(method: str, name: str, *, watched: bool) -> str:
    """The API's verb for reading or deleting one object, or a collection."""
    if method == "DELETE":
        return "delete" if name else "deletecollection"
    if watched:
        return "watch"
    return "get" if name else "list"


def _failure(code: int, message: str) -> Object:
    return {"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": code, "message": message}


def _matches(pod: Object, query: Mapping[str, list[str]]) -> bool:
    """Whether a pod has the labels, and the name, that a request selects."""
    labels = pod["metadata"].get("labels", {}) | {"metadata.name": pod["metadata"]["name"]}
    selectors = [part for key in ("labelSelector", "fieldSelector") for part in query.get(key, [""])[0].split(",")]
    wanted = [part.partition("=") for part in selectors if "=" in part and "!=" not in part]
    return all(labels.get(key) == value.lstrip("=") for key, _, value in wanted)


class _Handler(BaseHTTPRequestHandler):
    api: ClassVar[KubernetesApi]
    protocol_version = "HTTP/1.1"

    def _respond(self) -> None:
        url = urlsplit(self.path)
        query = parse_qs(url.query)
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        *_, resource, name = [*url.path.partition("/namespaces/")[2].split("/"), "", ""][1:3]
        try:
            status, answer = HTTPStatus.OK, self.api.answer(self.command, resource, name, query, body)
        except PermissionError as error:
            status, answer = HTTPStatus.FORBIDDEN, _failure(403, str(error))
        except KeyError:
            status, answer = HTTPStatus.NOT_FOUND, _failure(404, "not found")
        text = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        # A client that gets no WebSocket watches by HTTP.
        if status == HTTPStatus.OK and query.get("watch") == ["true"] and "Upgrade" not in self.headers:
            self._send_no_events()
            return
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def _send_no_events(self) -> None:
        """Leave a watch without events: Spark also lists its pods now and then."""
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        self.wfile.flush()
        self.api.ended.wait()
        self.close_connection = True

    do_GET = do_POST = do_DELETE = do_PATCH = do_PUT = _respond  # noqa: N815 -- BaseHTTPRequestHandler's names

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 -- BaseHTTPRequestHandler's name
        """Write nothing."""
