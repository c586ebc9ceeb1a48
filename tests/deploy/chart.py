"""The chart as Helm renders it. Helm, kubeconform and helm-docs are those that `make test` builds."""

import base64
import functools
import json
import re
import subprocess
import tomllib
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from local import go_tools
from local.generate import CHART as CHART_PATH

from tests.deploy.metric_names import ROOT
from tests.deploy.served_helm import Outcome, served_helms

CHART = ROOT / CHART_PATH
RELEASE, NAMESPACE = "r", "messaging"
NAME = "r-pulsar-trio-proxy"
VALUES: Any = yaml.safe_load((CHART / "values.yaml").read_text())

OLDEST, *_, NEWEST = go_tools.KUBERNETES
OPTIONS = ("--namespace", NAMESPACE, "--kube-version", NEWEST)

needs_tools = pytest.mark.skipif(not go_tools.available(), reason="Go builds Helm, and is missing or too old")


class Refused(Exception):
    """Helm renders nothing; the text says why."""


def helm_template(values: Mapping[str, Any], kubernetes: str = NEWEST, release: str = RELEASE) -> str:
    """What `helm template` writes for these values over the chart's own; raises Refused.

    Another Helm renders it, too, and has to write the same, if a line has a shape that was not compared yet.
    """
    outcome = _outcome(json.dumps(values), kubernetes, release)
    if outcome.returncode != 0:
        raise Refused(outcome.stderr)
    return outcome.stdout


@functools.cache
def _outcome(values: str, kubernetes: str, release: str) -> Outcome:
    newest, *others = go_tools.HELMS
    call = (values, kubernetes, release, RELEASE, str(CHART), *OPTIONS)
    outcomes = with_same_token(served_helms([newest], *call))
    new = shapes(outcomes[newest]) - _compared
    if new:
        outcomes |= with_same_token(served_helms(others, *call))
        assert_equal(outcomes)
        _compared.update(new)
    return outcomes[newest]


_compared: set[str] = set()
"""The shapes of lines that all Helms have rendered."""


def shapes(outcome: Outcome) -> set[str]:
    """Lines with `a` for each word and `0` for each number of their value: what Helms could write differently."""
    found = set()
    for line in (outcome.stdout + outcome.stderr).splitlines():
        key, separator, value = re.fullmatch(r"(?:(.*?)(: | = ))?(.*)", line).groups("")  # type: ignore[union-attr]
        found.add(key + separator + re.sub(r"[0-9]+", "0", re.sub(r"[A-Za-z]+", "a", value)))
    return found


MADE_TOKEN = re.compile(r"(?<=: )[A-Za-z0-9+/]{54}==$", re.MULTILINE)
"""A token of 40 letters and digits that the chart makes, in a Secret."""
SAME_TOKEN = base64.b64encode(b"the same token in all renderings").decode()


def helms(*arguments: str | Path, cwd: Path | None = None) -> dict[str, Outcome]:
    """What each Helm answers, by its name in go_tools; all at once. Tokens that the chart makes are SAME_TOKEN."""
    return with_same_token(helms_as_they_are(*arguments, cwd=cwd))


def with_same_token(outcomes: dict[str, Outcome]) -> dict[str, Outcome]:
    """These, with SAME_TOKEN for the tokens that the chart makes."""
    for outcome in outcomes.values():
        outcome.stdout = MADE_TOKEN.sub(SAME_TOKEN, outcome.stdout)
    return outcomes


def helms_as_they_are(*arguments: str | Path, cwd: Path | None = None) -> dict[str, Outcome]:
    """What each Helm answers, with the tokens that the chart makes."""
    running = {
        name: subprocess.Popen(
            [go_tools.tool(name), *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=cwd,
        )
        for name in go_tools.HELMS
    }
    return {
        name: subprocess.CompletedProcess(process.args, process.returncode, *output)
        for name, process in running.items()
        for output in [process.communicate()]
    }


def assert_equal(outcomes: Mapping[str, Outcome]) -> None:
    """An error unless all render the same, or all refuse for the same reason."""
    first, *others = outcomes
    for other in others:
        assert _gist(outcomes[other]) == _gist(outcomes[first]), f"{other} and {first} differ"


def _gist(outcome: Outcome) -> object:
    """The objects, since Helm 3 leaves more empty lines; or the refusal's words, whose order is by chance in a list."""
    if outcome.returncode == 0:
        return list(yaml.load_all(outcome.stdout, yaml.CSafeLoader))
    return Counter(outcome.stderr.replace(",", " ").split())


class Manifests:
    """Objects by kind and name."""

    def __init__(self, text: str) -> None:
        self.all = [one for one in yaml.load_all(text, yaml.CSafeLoader) if one]

    def names(self, kind: str) -> list[str]:
        """The names of a kind."""
        return [one["metadata"]["name"] for one in self.all if one["kind"] == kind]

    def get(self, kind: str, name: str = NAME) -> Any:
        """One object; an error if there is not exactly one."""
        (found,) = (one for one in self.all if one["kind"] == kind and one["metadata"]["name"] == name)
        return found

    @property
    def pod(self) -> Any:
        """The proxy's pods."""
        kind = "DaemonSet" if self.names("DaemonSet") else "Deployment"
        return self.get(kind)["spec"]["template"]

    @property
    def container(self) -> Any:
        """The proxy's container."""
        return self.pod["spec"]["containers"][0]

    @property
    def configuration(self) -> dict[str, Any]:
        """What proxy.toml says."""
        return tomllib.loads(self.get("ConfigMap")["data"]["proxy.toml"])


def render(**values: Any) -> Manifests:
    """The manifests for some values."""
    return Manifests(helm_template(values))


def deep_merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Maps merged, all else replaced."""
    merged = dict(base)
    for key, value in over.items():
        both = isinstance(value, Mapping) and isinstance(merged.get(key), Mapping)
        merged[key] = deep_merge(merged[key], value) if both else value
    return merged


def write(path: Path, text: str) -> Path:
    """A file with this text."""
    path.write_text(text)
    return path
