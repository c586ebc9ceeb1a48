"""Tenants of topics and namespaces, as brokers read them (TopicName, NamespaceName)."""

DEFAULT_TENANT = "public"


def tenant_of(subject: str) -> str:
    """Return the tenant of a topic or a namespace: "public" for a topic without one.

    What no broker serves has some tenant, too, the text before the first slash.
    """
    domain, found, rest = subject.partition("://")
    path = rest if found else domain
    tenant, has_namespace, _ = path.partition("/")
    return tenant if found or has_namespace else DEFAULT_TENANT
