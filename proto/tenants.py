"""Tenants of topics and namespaces, as brokers read them (TopicName, NamespaceName)."""

DEFAULT_TENANT = "public"


def tenant_of(subject: str) -> str:
    """Return the tenant of a topic or a namespace: "public" for a topic without one, also with slashes around it.

    What no broker serves has some tenant, too, the text before the first slash.
    """
    domain, found, rest = subject.partition("://")
    if not found and "/" not in subject.strip("/"):  # TopicName drops empty parts of a short name
        return DEFAULT_TENANT
    return (rest if found else domain).partition("/")[0]
