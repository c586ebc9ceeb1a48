"""Placeholder."""

from dataclasses import dataclass

import trio

from proxy.config.types import Config
from proxy.http.client import Authenticator, HttpClient, Locator, Requests


@dataclass(frozen=True, slots=True)
class HttpServices:
    config: Config
    authenticator: Authenticator
    locator: Locator
    requests: Requests


async def serve_connection(stream: trio.abc.HalfCloseableStream, client: HttpClient, services: HttpServices) -> None:
    await stream.receive_some(8192)
    await stream.send_all(b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
