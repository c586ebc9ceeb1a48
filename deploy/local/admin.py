"""A small client of a broker's admin REST API, with only the calls that the tests and `make run` need."""

from __future__ import annotations

import json
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Sequence

_PRODUCE_AND_CONSUME = ("produce", "consume")

# Without the environment's HTTP proxy: the broker is on this machine or close to it.
_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class AdminError(Exception):
    """The broker answered with an error; `status` is the HTTP status."""

    def __init__(self, method: str, path: str, status: int, reason: str) -> None:
        super().__init__(f"{method} {path}: {status} {reason}")
        self.status = status
        self.reason = reason


class Admin:
    """The admin API at `url` (`http://host:port`), with an optional bearer token."""

    def __init__(self, url: str, token: str | None = None, timeout_s: float = 30.0) -> None:
        self._url = url.rstrip("/")
        self._timeout_s = timeout_s
        self._headers = {"Content-Type": "application/json"}
        if token is not None:
            self._headers["Authorization"] = f"Bearer {token}"

    def request(self, method: str, path: str, body: object = None) -> object:
        """Call `path`, below /admin/v2/ unless it begins with a slash.

        Returns the JSON, or the text where it is none, or None where there is nothing.
        """
        url = self._url + (path if path.startswith("/") else f"/admin/v2/{path}")
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(url, data=data, method=method, headers=self._headers)
        try:
            with _opener.open(request, timeout=self._timeout_s) as response:
                text = response.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                raise AdminError(method, path, error.code, error.read().decode(errors="replace")) from None
        return _value(text)

    def health(self) -> bool:
        """Return True if the broker's own test message works; False also while the broker cannot be reached."""
        try:
            return self.request("GET", "brokers/health") == "ok"
        except (AdminError, OSError):
            return False

    def create_tenant(
        self, tenant: str, clusters: Sequence[str] = ("standalone",), admin_roles: Sequence[str] = ()
    ) -> None:
        """Create a tenant."""
        body = {"allowedClusters": list(clusters), "adminRoles": list(admin_roles)}
        self.request("PUT", f"tenants/{tenant}", body)

    def create_namespace(self, namespace: str) -> None:
        """Create `tenant/namespace`."""
        self.request("PUT", f"namespaces/{namespace}", {})

    def grant_namespace(self, namespace: str, role: str, actions: Sequence[str] = _PRODUCE_AND_CONSUME) -> None:
        """Allow a role these actions on all topics of the namespace."""
        self.request("POST", f"namespaces/{namespace}/permissions/{role}", list(actions))

    def topics(self, namespace: str) -> list[str]:
        """Return the persistent topics, with each partition as one."""
        answer = self.request("GET", f"persistent/{namespace}")
        assert isinstance(answer, list)
        return [str(topic) for topic in answer]

    def create_topic(self, topic: str) -> None:
        """Create a topic without partitions."""
        self.request("PUT", _topic_path(topic))

    def create_partitioned_topic(self, topic: str, partitions: int) -> None:
        """Create a topic with partitions."""
        self.request("PUT", f"{_topic_path(topic)}/partitions", partitions)

    def unload_topic(self, topic: str) -> None:
        """Make the broker release the topic; clients look it up again."""
        self.request("PUT", f"{_topic_path(topic)}/unload")

    def grant_topic(self, topic: str, role: str, actions: Sequence[str] = _PRODUCE_AND_CONSUME) -> None:
        """Allow a role these actions on one topic."""
        self.request("POST", f"{_topic_path(topic)}/permissions/{role}", list(actions))

    def owner(self, topic: str) -> str:
        """Return the service URL of the broker that serves the topic."""
        answer = self.request("GET", f"/lookup/v2/topic/{_topic_path(topic)}")
        assert isinstance(answer, dict)
        return str(answer["brokerUrl"])

    def stats(self, topic: str) -> dict[str, object]:
        """Return the topic's statistics: producers, subscriptions and rates."""
        answer = self.request("GET", f"{_topic_path(topic)}/stats")
        assert isinstance(answer, dict)
        return answer


def _topic_path(topic: str) -> str:
    """Return `persistent://t/n/x` or `t/n/x` as a path; a short name is in public/default."""
    domain, separator, name = topic.rpartition("://")
    if not separator:
        domain = "persistent"
    if "/" not in name:
        name = f"public/default/{name}"
    tenant, namespace, local = name.split("/", 2)
    return f"{domain}/{tenant}/{namespace}/{urllib.parse.quote(local, safe='')}"


def _value(text: str) -> object:
    if not text:
        return None
    try:
        return json.loads(text)
    except ValueError:
        return text
