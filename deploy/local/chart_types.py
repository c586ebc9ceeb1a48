"""The types of single values of the Helm chart; local.chart_values has the tables that they are in.

Each refers to a definition of local.value_formats, or has its own bounds.
"""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from local.value_formats import ref


def defined(name: str) -> Meta:
    """Return the annotation of a type whose schema is this definition of local.value_formats."""
    return Meta(extra_json_schema=ref(name))


Text = str
NonEmpty = Annotated[str, Meta(min_length=1)]
Port = Annotated[int, defined("Port")]
NodePort = Annotated[int, defined("NodePort")]
Count = Annotated[int, Meta(ge=1)]
Natural = Annotated[int, Meta(ge=0)]
Duration = Annotated[str, defined("Duration")]
PortName = Annotated[str, Meta(pattern="^[a-z0-9]([a-z0-9-]{0,12}[a-z0-9])?$")]
Digest = Annotated[str, Meta(pattern="^(sha256:[0-9a-f]{64})?$")]
Tag = Annotated[str, Meta(pattern=r"^([A-Za-z0-9_][-A-Za-z0-9_.]{0,127})?$")]
Repository = Annotated[str, defined("ImageRepository")]
SparkMemory = Annotated[str, Meta(pattern="^[1-9][0-9]*[kmg]$")]
ApiServer = Annotated[str, Meta(pattern="^https://[^/]+$")]
CountOrPercent = Annotated[int | str, defined("CountOrPercentMax100OrEmpty")]
Size = Annotated[str, defined("ByteQuantity")]
Schedule = Annotated[str, defined("CronSchedule")]
Cidr = Annotated[str, defined("Cidr")]
Address = Annotated[str, defined("IpAddress")]
ClusterIp = Annotated[str, defined("ClusterIp")]
AddressOrEmpty = Annotated[str, defined("IpAddressOrEmpty")]
HostName = Annotated[str, defined("HostName")]
HostNameOrEmpty = Annotated[str, defined("HostNameOrEmpty")]
RouteHostName = Annotated[str, defined("RouteHostName")]
PathPrefix = Annotated[str, defined("PathPrefix")]
Label = Annotated[str, defined("DnsLabelOrEmpty")]
ServiceName = Annotated[str, defined("ServiceNameOrEmpty")]
Name = Annotated[str, defined("DnsNameOrEmpty")]
"""Of a Secret, a class, an account: of another object."""
SecretName = Annotated[str, defined("DnsName")]
Qualified = Annotated[str, defined("LabelKeyOrEmpty")]
DataKey = Annotated[str, defined("KeyOfData")]
DataKeyOrEmpty = Annotated[str, defined("KeyOfDataOrEmpty")]
PullPolicy = Literal["Always", "IfNotPresent", "Never"]
WhenUnsatisfiable = Literal["", "ScheduleAnyway", "DoNotSchedule"]
Labels = Annotated[dict[str, str], defined("Labels")]
Annotations = Annotated[dict[str, str], defined("Annotations")]
Object = dict[str, Any]

Affinity = Annotated[Object, defined("core.v1.Affinity")]
Behavior = Annotated[Object, defined("autoscaling.v2.HorizontalPodAutoscalerBehavior")]
Container = Annotated[Object, defined("core.v1.Container")]
DaemonSetStrategy = Annotated[Object, defined("apps.v1.DaemonSetUpdateStrategy")]
DeploymentStrategy = Annotated[Object, defined("apps.v1.DeploymentStrategy")]
DnsConfig = Annotated[Object, defined("core.v1.PodDNSConfig")]
EgressRule = Annotated[Object, defined("networking.v1.NetworkPolicyEgressRule")]
EnvFrom = Annotated[Object, defined("core.v1.EnvFromSource")]
EnvVar = Annotated[Object, defined("core.v1.EnvVar")]
HostAlias = Annotated[Object, defined("core.v1.HostAlias")]
Lifecycle = Annotated[Object, defined("core.v1.Lifecycle")]
Metric = Annotated[Object, defined("autoscaling.v2.MetricSpec")]
Peer = Annotated[Object, defined("networking.v1.NetworkPolicyPeer")]
PodSecurityContext = Annotated[Object, defined("core.v1.PodSecurityContext")]
Reference = Annotated[Object, defined("core.v1.LocalObjectReference")]
Relabeling = Annotated[Object, defined("RelabelConfig")]
Resources = Annotated[Object, defined("core.v1.ResourceRequirements")]
SecurityContext = Annotated[Object, defined("core.v1.SecurityContext")]
SpreadConstraint = Annotated[Object, defined("core.v1.TopologySpreadConstraint")]
Toleration = Annotated[Object, defined("core.v1.Toleration")]
Volume = Annotated[Object, defined("core.v1.Volume")]
VolumeMount = Annotated[Object, defined("core.v1.VolumeMount")]


class Values(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel", omit_defaults=True):
    """Base of all tables of values: an unknown key is an error."""


class ImageValues(Values, frozen=True):
    repository: Repository = ""
    tag: Tag = ""
    digest: Digest = ""
    pull_policy: PullPolicy = "IfNotPresent"
