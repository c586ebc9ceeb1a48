"""analytics.remote_write.negotiation: any two headers have a version, or are refused."""

from __future__ import annotations

from analytics.remote_write.negotiation import UnsupportedError, protocol_version

SEEDS = (
    b"",
    b"application/x-protobuf",
    b"application/x-protobuf\nsnappy",
    b"application/x-protobuf;proto=io.prometheus.write.v2.Request\nSnappy ",
    b'application/x-protobuf; proto="prometheus.WriteRequest"; a=b',
    b"application/x-protobuf;proto*0=io.prometheus;proto*1=.write.v2.Request",
    b"application/x-protobuf;proto*=utf-8'en'prometheus.WriteRequest;proto*0=a",
    b"text/plain;;=\n gzip",
)


def check(data: bytes) -> None:
    """A line for each header; they are text as HttpServer makes it of bytes."""
    content_type, _, encoding = data.decode("latin-1").partition("\n")
    try:
        version = protocol_version.__wrapped__(content_type, encoding)
    except UnsupportedError:
        return
    assert version in {1, 2}
    assert encoding.strip().lower() in {"", "snappy"}
