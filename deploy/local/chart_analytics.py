"""The tables below `analytics` of the Helm chart's values."""

from typing import Literal

from analytics.receiver.config import Config as ReceiverConfig
from local.chart_types import (
    Affinity,
    Annotations,
    ApiServer,
    Count,
    DataKey,
    EnvVar,
    ImageValues,
    Labels,
    Name,
    Natural,
    NonEmpty,
    Peer,
    Resources,
    Schedule,
    Size,
    SparkMemory,
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


class Executors(Values, frozen=True):
    enabled: bool = False
    api_server: ApiServer = ""
    count: Count = 1
    cores: Count = 1
    memory: SparkMemory = ""
    memory_overhead: SparkMemory = ""
    resources: Resources = {}


class RetentionDays(Values, frozen=True, rename=str):
    """By the tables' own names; those that `pulsar-proxy-analytics expire` takes."""

    samples: Natural = 0
    histograms: Natural = 0
    rollup_1m: Natural = 0
    histograms_1m: Natural = 0
    usage_ledger: Natural = 0
    rollup_1h: Natural = 0
    histograms_1h: Natural = 0
    rollup_1d: Natural = 0
    histograms_1d: Natural = 0
    usage_hourly: Natural = 0
    usage_daily: Natural = 0


class Retention(Values, frozen=True):
    spool_hours: Natural = 0
    days: RetentionDays = RetentionDays()


class Rollup(Values, frozen=True):
    enabled: bool = False
    schedule: Schedule = ""
    tables: NonEmpty = ""
    command: list[NonEmpty] = []
    master: NonEmpty = ""
    spark_arguments: list[str] = []
    jobs: list[NonEmpty] = []
    executors: Executors = Executors()
    compacted_partitions_max: Count = 1
    retention: Retention = Retention()
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
