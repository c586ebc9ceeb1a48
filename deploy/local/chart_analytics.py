"""The tables below `analytics` of the Helm chart's values."""

from typing import Literal

from analytics.receiver.config import Config as ReceiverConfig
from local.chart_types import (
    Affinity,
    Annotations,
    Count,
    DataKey,
    EnvVar,
    ImageValues,
    Labels,
    Name,
    NonEmpty,
    Peer,
    Resources,
    Schedule,
    Size,
    Text,
    Toleration,
    Values,
)


class Persistence(Values, frozen=True):
    size: Size = ""
    storage_class_name: Name = ""
    access_modes: list[Literal["ReadWriteOnce", "ReadWriteMany"]] = []
    existing_claim: Name = ""


class Receiver(Values, frozen=True):
    enabled: bool = False
    config: ReceiverConfig = ReceiverConfig()
    command: list[NonEmpty] = []
    token_secret: Name = ""
    token_key: DataKey = ""
    tls_secret: Name = ""
    peers: list[Peer] = []
    service_monitor: bool = False
    persistence: Persistence = Persistence()
    pod_annotations: Annotations = {}
    pod_labels: Labels = {}
    extra_env: list[EnvVar] = []
    resources: Resources = {}
    termination_grace_period_seconds: Count = 1
    node_selector: Labels = {}
    tolerations: list[Toleration] = []
    affinity: Affinity = {}
    priority_class_name: Name = ""
    runtime_class_name: Name = ""


class Rollup(Values, frozen=True):
    enabled: bool = False
    schedule: Schedule = ""
    tables: NonEmpty = ""
    command: list[NonEmpty] = []
    spark_arguments: list[str] = []
    program: Text = ""
    active_deadline_seconds: Count = 1
    extra_env: list[EnvVar] = []
    pod_annotations: Annotations = {}
    pod_labels: Labels = {}
    resources: Resources = {}
    scratch_size: Size = ""
    node_selector: Labels = {}
    tolerations: list[Toleration] = []
    priority_class_name: Name = ""
    runtime_class_name: Name = ""


class Analytics(Values, frozen=True):
    image: ImageValues = ImageValues()
    receiver: Receiver = Receiver()
    rollup: Rollup = Rollup()
