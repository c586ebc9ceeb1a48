"""The formats of names, quantities, addresses and times in the chart's values.

Patterns are for Go's regular expressions, which have no lookahead. The name of a pattern's group says in Helm's message
what is expected.
"""

from typing import Any

from local.kubernetes_definitions import REFERENCE, Schema

_LABEL = "[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?"
_SUBDOMAIN = rf"{_LABEL}(\.{_LABEL})*"
_LETTERED = "[a-z]([-a-z0-9]{0,61}[a-z0-9])?"
"""What the last part of a host's name is, and of no address."""
_WORD = "[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?"
_LABEL_KEY = f"({_SUBDOMAIN}/)?{_WORD}"
_OCTET = "(25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
_IPV4 = rf"{_OCTET}(\.{_OCTET}){{3}}"
_IPV6 = "[0-9a-fA-F]{0,4}(:[0-9a-fA-F]{0,4}){2,7}"
_CIDR = f"{_IPV4}/(3[0-2]|[12]?[0-9])|{_IPV6}/(12[0-8]|1[01][0-9]|[1-9]?[0-9])"
_PORT_NAME = "([a-z0-9]-?)*[a-z]([a-z0-9]|-[a-z0-9])*"
_NUMBER = r"([0-9]+(\.[0-9]*)?|\.[0-9]+)"
_BYTE_UNITS = "([KMGTPE]i|[kMGTPE])"
_GO_DURATION = "([0-9]+h)?([0-9]+m)?([0-9]+s)?([0-9]+ms)?"
_ACTIONS = (
    "Replace", "Keep", "Drop", "HashMod", "LabelMap", "LabelDrop", "LabelKeep", "Lowercase", "Uppercase", "KeepEqual",
    "DropEqual",
)  # fmt: skip
"""Of Prometheus' relabelings."""
_IMAGE_HOST = r"([A-Za-z0-9.-]+|\[[0-9a-fA-F:]+\])(:[0-9]+)?"
_IMAGE_PART = "[a-z0-9]+([._-]+[a-z0-9]+)*"


def ref(name: str) -> Schema:
    """Return a reference to a definition."""
    return {"$ref": REFERENCE + name}


def one_of(*values: str) -> Schema:
    """Return the schema of a string with one of these values."""
    return {"type": "string", "enum": list(values)}


def _pattern(expected: str, pattern: str) -> str:
    return f"^(?<{expected}>{pattern})$"


def text(expected: str, pattern: str, length_max: int = 0) -> Schema:
    """Return the schema of a string with this pattern, named by what is expected."""
    tree = {"type": "string", "pattern": _pattern(expected, pattern)}
    return {**tree, "maxLength": length_max} if length_max else tree


def number(minimum: int, maximum: int | None = None) -> Schema:
    """Return the schema of an integer with these bounds."""
    return {"type": "integer", "minimum": minimum, **({} if maximum is None else {"maximum": maximum})}


def array(item: Schema, **more: Any) -> Schema:
    """Return the schema of a list."""
    return {"type": "array", "items": item, **more}


def _map(key: str, value: Schema) -> Schema:
    """Return the schema of a map. With `propertyNames` Helm's validator would name another object than this one."""
    return {"type": "object", "patternProperties": {f"^({key})$": value}, "additionalProperties": False}


def _cron() -> Schema:
    """Return the schema of a schedule, as Kubernetes' parser takes it: five fields, or a word. A pattern for each field
    keeps the message short.
    """
    fields = {
        "minute": "[0-5]?[0-9]",
        "hour": "([01]?[0-9]|2[0-3])",
        "day_of_month": "(0?[1-9]|[12][0-9]|3[01])",
        "month": "(0?[1-9]|1[0-2]|(?i:jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec))",
        "day_of_week_0_to_6": "(0?[0-6]|(?i:sun|mon|tue|wed|thu|fri|sat))",
    }
    words = "@(yearly|annually|monthly|weekly|daily|midnight|hourly|every [0-9]+[hm])"
    patterns = [_pattern("five_fields", rf"{words}|[^@ ]+( +[^ ]+){{4}}")]
    for position, (name, value) in enumerate(fields.items()):
        entry = f"([*?]|{value}(-{value})?)(/[1-9][0-9]?)?"
        patterns.append(f"^(@.*|([^ ]+ +){{{position}}}(?<{name}>{entry}(,{entry})*)( .*)?)$")
    return {"type": "string", "allOf": [{"pattern": pattern} for pattern in patterns]}


FORMATS: dict[str, Schema] = {
    "Annotations": _map(f"((?i:{_SUBDOMAIN})/)?{_WORD}", {"type": "string"}),
    "ByteQuantity": {
        "type": ["string", "number"],
        "minimum": 1_000_000,
        "pattern": _pattern("bytes_as_512Mi", rf"{_NUMBER}{_BYTE_UNITS}|[0-9]{{7,}}|[0-9]+[eE][0-9]+"),
    },
    "Cidr": text("network_as_10_0_0_0_slash_8", _CIDR),
    "ClusterIp": text("IP_address_or_None", f"({_IPV4}|{_IPV6}|None)?"),
    "CountOrPercent": {
        "type": ["integer", "string"],
        "minimum": 0,
        "pattern": _pattern("number_or_percent", "[0-9]+%"),
    },
    "CountOrPercentMax100": {
        "type": ["integer", "string"],
        "minimum": 0,
        "pattern": _pattern("number_or_percent", "(100|[1-9]?[0-9])%"),
    },
    "CpuQuantity": {
        "type": ["string", "number"],
        "minimum": 0,
        "pattern": _pattern("CPUs_as_1_or_500m", r"[0-9]+(\.[0-9]{0,3})?|\.[0-9]{1,3}|[0-9]+m"),
    },
    "CronSchedule": _cron(),
    "DnsLabel": text("DNS_label", _LABEL, 63),
    "DnsName": text("name_of_an_object", _SUBDOMAIN, 253),
    "Duration": {**text("duration_as_1h30m", _GO_DURATION), "minLength": 1},
    "EnvName": text("name_of_a_variable", "[-._a-zA-Z][-._a-zA-Z0-9]*"),
    "FileMode": number(0, 0o777),
    "HostName": text("host_name", rf"(\*\.)?{_SUBDOMAIN}", 253),
    "ImageRepository": text(
        "image_without_scheme", rf"({_IMAGE_HOST}/)?{_IMAGE_PART}(/{_IMAGE_PART})*(:[\w.-]*)?(@.*)?"
    ),
    "IpAddress": text("IP_address", f"{_IPV4}|{_IPV6}"),
    "KeyOfData": text("key_of_a_Secret_or_ConfigMap", "[-._a-zA-Z0-9]+", 253),
    "LabelKey": text("key_of_a_label", _LABEL_KEY, 317),
    "LabelValue": text("label_value", f"({_WORD})?"),
    "Labels": _map(_LABEL_KEY, ref("LabelValue")),
    "NodePort": {"type": "integer", "maximum": 32767, "anyOf": [{"const": 0}, {"minimum": 30000}]},
    "PathPrefix": text("path_without_dots", "/|(/[A-Za-z0-9_~-][A-Za-z0-9_~.-]*)+/?", 1024),
    "Port": number(1, 65535),
    "PortName": text("name_of_a_port", _PORT_NAME, 15),
    "PortOrName": {
        "type": ["integer", "string"],
        "minimum": 1,
        "maximum": 65535,
        "maxLength": 15,
        "pattern": _pattern("name_of_a_port", _PORT_NAME),
    },
    "RelabelConfig": {
        "type": "object",
        "properties": {
            "action": one_of(*_ACTIONS, *(name.lower() for name in _ACTIONS)),
            "modulus": number(1),
            "regex": {"type": "string"},
            "replacement": {"type": "string"},
            "separator": {"type": "string"},
            "sourceLabels": array(text("name_of_a_metric_label", "[a-zA-Z_][a-zA-Z0-9_]*")),
            "targetLabel": {"type": "string"},
        },
        "additionalProperties": False,
    },
    # Gateways refuse a name that is an address, and names without a letter in general.
    "RouteHostName": text("host_name_with_a_letter", rf"(\*\.)?({_LABEL}\.)*{_LETTERED}", 253),
    "UserId": number(0, (1 << 31) - 1),
    "ServiceNameOrEmpty": text("name_of_a_Service", "([a-z]([-a-z0-9]*[a-z0-9])?)?"),
    "api.resource.Quantity": {
        "type": ["string", "number"],
        "minimum": 0,
        "pattern": _pattern("quantity", rf"{_NUMBER}([KMGTPE]i|[numkMGTPE]|[eE][-+]?[0-9]+)?"),
    },
    "meta.v1.ObjectMeta": {
        "type": "object",
        "properties": {"labels": ref("Labels"), "annotations": ref("Annotations")},
        "additionalProperties": False,
    },
    "util.intstr.IntOrString": ref("CountOrPercent"),
}
"""Definitions of our own, by name."""

for _name in ("CountOrPercentMax100", "DnsLabel", "DnsName", "HostName", "IpAddress", "KeyOfData", "LabelKey"):
    FORMATS[f"{_name}OrEmpty"] = {**FORMATS[_name], "pattern": f"^{FORMATS[_name]['pattern'][1:-1]}?$"}
