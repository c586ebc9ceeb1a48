"""`helm test`: sends one message from a producer to a consumer, both through the proxy; asks a broker by HTTP.

Runs in the proxy's own image and uses its package `proto` for the protocol; the few commands that a proxy never decodes
are encoded here (PulsarApi.proto has the field numbers). Exits with 0, or with 1 and a line for each attempt: what has
failed, and the value of the chart to look at.

Environment: SERVICE_URL, TOPIC; optional TOKEN_FILE, CERTIFICATE_FILE with KEY_FILE, and CA_FILE (without a file at
CA_FILE, the system's authorities are trusted); HTTP_URL with HTTP_CERTIFICATE_HOST, for which its certificate must be;
TIMEOUT_S for each of ATTEMPTS.
"""

import http.client
import os
import socket
import ssl
import sys
import time
import uuid
from pathlib import Path

from lookup.targets.rules import host_pattern_for
from proto.addresses import parse_host_port, parse_service_url, parse_web_url, speaks_tls
from proto.commands import PROTOCOL_VERSION, connect, encode, parse_command, pong
from proto.frames import Frame, FrameDecoder, encode_frame
from proto.pulsar_pb2 import BaseCommand, CommandConnect, CommandLookupTopic
from proxy.runtime.network.dial_rules import PULSAR_PORTS

FRAME_BYTES_MAX = 8 * 1024 * 1024
PAUSE_S = 2.0
VARINT_BITS = 0x7F
NAME_MISMATCHES = (62, 64)
"""OpenSSL's X509_V_ERR_HOSTNAME_MISMATCH and X509_V_ERR_IP_ADDRESS_MISMATCH."""

ADVICE = {
    "The topic's broker cannot be validated": "config.brokers.allowed_hosts: a broker redirects to a host to which the "
    "proxy may not connect; the proxy's log has its name, and what to set if it is yours",
    "The proxy cannot connect to the broker": "config.brokers.service_url, brokerTls: the broker does not answer, or "
    "its certificate is not accepted or for another name; the proxy's log has the reason",
    "The broker does not accept the proxy's own credentials": "auth.proxyToken, config.brokers.credentials: brokers "
    "refuse the proxy's credentials; give it some that they accept",
    "The broker does not accept the credentials": "auth.proxyToken, auth.token: brokers refuse the proxy's credentials "
    "or the test's token; both need the same keys as the proxy",
    "HTTP 401": "test.tokenSecret: the proxy or the broker does not accept the test's credentials by HTTP; with none "
    "that it accepts, set test.http: false",
    "HTTP 50": "config.brokers.web_service_url: the brokers' web port does not answer; the proxy's log has the reason",
    "Failed to authenticate": "test.tokenSecret: the proxy does not accept the test's credentials; name a Secret with "
    "a client's token",
}
"""What to look at, by the beginning of the proxy's words."""


class Failed(Exception):
    """A failed step of the test, in the words of the answer; ``broker``: on a relay to this one."""

    def __init__(self, step: str, answer: str, broker: str = "") -> None:
        super().__init__(f"{step}: {answer}")
        self.answer = answer
        self.broker = broker


def advice(error: Exception, host: str) -> str:
    """Return the value of the chart to look at, and why; empty if unknown. ``host``: that of the Service."""
    if isinstance(error, Failed):
        if error.answer.startswith("Target broker cannot be validated"):
            return target_advice(error.broker)
        return next((text for words, text in ADVICE.items() if error.answer.startswith(words)), "")
    text = ""
    match error:
        case ssl.SSLCertVerificationError() if error.verify_code in NAME_MISMATCHES:
            text = f"test.host: the listener's certificate is not for {host}; set a name that it has"
        case ssl.SSLCertVerificationError():
            text = "test.caSecret: the listener's certificate is not trusted; name the Secret with its authority"
        case socket.gaierror():
            text = f"test.host: DNS does not know {host}"
        case ConnectionRefusedError():
            text = (
                f"no pod of the proxy is ready behind {host}; if pods run, no broker answers "
                "(config.brokers.service_url, brokerTls) or brokers refuse the proxy's credentials (auth.proxyToken): "
                "the proxy's log says which"
            )
    return text


def target_advice(broker: str) -> str:
    """Return what to set where the proxy refuses a relay to the broker that a lookup named."""
    target = parse_host_port(broker)
    try:
        address = socket.getaddrinfo(target.host, None)[0][4][0]
    except OSError:
        return f"DNS does not know {target.host}: correct the brokers' advertisedAddress"
    key, value = ("hosts", host_pattern_for(target.host)) if address != target.host else ("addresses", address)
    port = "" if target.port in PULSAR_PORTS else f", and {target.port} to config.brokers.allowed_ports"
    text = f"config.brokers.allowed_{key}: the lookup named a broker to which the proxy may not connect"
    return f'{text}; if it is yours, add "{value}"{port}'


def varint(value: int) -> bytes:
    """Encode an integer as a protobuf varint."""
    parts = bytearray()
    while value > VARINT_BITS:
        parts.append(value & VARINT_BITS | 0x80)
        value >>= 7
    return bytes((*parts, value))


def message(fields: dict[int, int | str | bytes]) -> bytes:
    """Encode a protobuf message of integers, texts and messages, by field number."""
    parts = []
    for number, value in fields.items():
        if isinstance(value, int):
            parts.append(varint(number << 3) + varint(value))
        else:
            data = value.encode() if isinstance(value, str) else value
            parts.append(varint(number << 3 | 2) + varint(len(data)) + data)
    return b"".join(parts)


def subscribe(topic: str) -> bytes:
    """Encode an exclusive, non-durable SUBSCRIBE, which leaves no subscription on the broker."""
    body = message({1: topic, 2: f"helm-test-{uuid.uuid4()}", 3: 0, 4: 1, 5: 1, 8: 0})
    return encode_frame(message({1: BaseCommand.SUBSCRIBE, 4: body}))


def flow() -> bytes:
    """Encode a FLOW of ten permits."""
    return encode_frame(message({1: BaseCommand.FLOW, 11: message({1: 1, 2: 10})}))


def producer(topic: str) -> bytes:
    """Encode a PRODUCER with a name assigned by the broker."""
    return encode_frame(message({1: BaseCommand.PRODUCER, 5: message({1: topic, 2: 1, 3: 2})}))


def send(payload: bytes) -> bytes:
    """Encode a SEND of one message, without the optional checksum."""
    metadata = message({1: "helm-test", 2: 0, 3: int(time.time() * 1000)})
    command = message({1: BaseCommand.SEND, 6: message({1: 1, 2: 0, 3: 1})})
    return encode_frame(command, len(metadata).to_bytes(4, "big") + metadata + payload)


def tls_context() -> ssl.SSLContext:
    """Return a TLS context with the trusted authorities and the client's certificate if configured."""
    authorities = os.environ.get("CA_FILE", "")
    context = ssl.create_default_context(cafile=authorities if os.path.exists(authorities) else None)
    if certificate := os.environ.get("CERTIFICATE_FILE"):
        context.load_cert_chain(certificate, os.environ["KEY_FILE"])
    return context


class Connection:
    """A connection to the proxy; operations raise TimeoutError after the deadline."""

    def __init__(self, url: str, deadline: float) -> None:
        self._deadline = deadline
        at = parse_service_url(url)[0]
        self._socket = socket.create_connection((at.host, at.port), timeout=self._left())
        if speaks_tls(url):
            self._socket = tls_context().wrap_socket(self._socket, server_hostname=at.host)
        self._decoder = FrameDecoder(max_frame_bytes=FRAME_BYTES_MAX)
        self._broker = ""

    def close(self) -> None:
        """Close the connection."""
        self._socket.close()

    def _left(self) -> float:
        left_s = self._deadline - time.monotonic()
        if left_s <= 0:
            raise TimeoutError
        return left_s

    def send(self, frame: bytes) -> None:
        """Send one frame."""
        self._socket.settimeout(self._left())
        self._socket.sendall(frame)

    def receive(self, wanted: int, doing: str) -> tuple[BaseCommand, Frame]:
        """Receive until a command of type `wanted`; answer PINGs, ignore others, raise Failed for errors."""
        while True:
            while (frame := self._decoder.next_frame()) is None:
                self._socket.settimeout(self._left())
                data = self._socket.recv(65536)
                if not data:
                    raise Failed(doing, "the connection was closed", self._broker)
                self._decoder.receive_data(data)
            command = parse_command(frame.command)
            if command.type == wanted:
                return command, frame
            if command.type == BaseCommand.PING:
                self.send(pong())
            elif command.type == BaseCommand.ERROR:
                raise Failed(doing, command.error.message, self._broker)
            elif command.type in {BaseCommand.CLOSE_PRODUCER, BaseCommand.CLOSE_CONSUMER, BaseCommand.SEND_ERROR}:
                raise Failed(doing, f"the broker answered with command {command.type}", self._broker)

    def handshake(self, broker: str = "") -> None:
        """Send CONNECT, with the token if configured, and await CONNECTED; `broker` requests a relay to it."""
        hello = CommandConnect(client_version="helm-test", protocol_version=PROTOCOL_VERSION)
        if broker:
            hello.proxy_to_broker_url = self._broker = broker
        if token_file := os.environ.get("TOKEN_FILE"):
            hello.auth_method_name = "token"
            hello.auth_data = Path(token_file).read_bytes().strip()
        self.send(connect(hello))
        self.receive(BaseCommand.CONNECTED, f"CONNECT{' to broker ' + broker if broker else ''}")


def broker_of(url: str, topic: str, deadline: float) -> str:
    """Look up the broker of a topic, as `host:port`."""
    connection = Connection(url, deadline)
    try:
        connection.handshake()
        question = CommandLookupTopic(topic=topic, request_id=1)
        connection.send(encode(BaseCommand(type=BaseCommand.LOOKUP, lookup_topic=question)))
        answer = connection.receive(BaseCommand.LOOKUP_RESPONSE, "LOOKUP")[0].lookup_topic_response
    finally:
        connection.close()
    found = answer.broker_service_url or answer.broker_service_url_tls
    if not found:
        raise Failed("LOOKUP", answer.message or "no broker in the answer")
    return str(found.partition("://")[2])


def one_message(url: str, topic: str, deadline: float) -> None:
    """Produce a message and consume it, over two relays."""
    broker = broker_of(url, topic, deadline)
    payload = uuid.uuid4().bytes
    consuming, producing = Connection(url, deadline), Connection(url, deadline)
    try:
        consuming.handshake(broker)
        consuming.send(subscribe(topic))
        consuming.receive(BaseCommand.SUCCESS, "SUBSCRIBE")
        consuming.send(flow())
        producing.handshake(broker)
        producing.send(producer(topic))
        producing.receive(BaseCommand.PRODUCER_SUCCESS, "PRODUCER")
        producing.send(send(payload))
        producing.receive(BaseCommand.SEND_RECEIPT, "SEND")
        while not consuming.receive(BaseCommand.MESSAGE, "consuming")[1].payload.endswith(payload):
            pass  # another producer's message on this topic
    finally:
        consuming.close()
        producing.close()


def clusters(url: str, deadline: float) -> None:
    """Ask for the clusters' names, which any client may see."""
    web, left_s = parse_web_url(url), max(deadline - time.monotonic(), 0.1)
    (at,) = web.hosts
    connection = http.client.HTTPConnection(at.host, at.port)
    connection.sock = socket.create_connection((at.host, at.port), timeout=left_s)
    try:
        if web.tls:
            connection.sock = tls_context().wrap_socket(
                connection.sock, server_hostname=os.environ["HTTP_CERTIFICATE_HOST"]
            )
        headers = {}
        if token_file := os.environ.get("TOKEN_FILE"):
            headers["Authorization"] = f"Bearer {Path(token_file).read_text().strip()}"
        connection.request("GET", "/admin/v2/clusters", headers=headers)
        response = connection.getresponse()
        text = response.read(FRAME_BYTES_MAX).decode(errors="replace")
        if response.status != http.client.OK:
            raise Failed(f"GET {url}/admin/v2/clusters", f"HTTP {response.status} {text}")
    except http.client.HTTPException as error:
        raise Failed(f"GET {url}/admin/v2/clusters", f"HTTP {error!r}") from error
    finally:
        connection.close()


def main() -> int:
    """Run the test up to ATTEMPTS times."""
    url, topic, web_url = os.environ["SERVICE_URL"], os.environ["TOPIC"], os.environ.get("HTTP_URL", "")
    attempts, timeout_s = int(os.environ.get("ATTEMPTS", "3")), float(os.environ.get("TIMEOUT_S", "30"))
    for attempt in range(1, attempts + 1):
        started_at, host = time.monotonic(), parse_service_url(url)[0].host
        try:
            one_message(url, topic, started_at + timeout_s)
            if web_url:
                host = parse_web_url(web_url).hosts[0].host
                clusters(web_url, started_at + timeout_s)
        except (Failed, OSError) as error:
            what = filter(None, (str(error) or type(error).__name__, advice(error, host)))
            print(f"attempt {attempt}: {'; '.join(what)}", file=sys.stderr)
            time.sleep(PAUSE_S if attempt < attempts else 0)
        else:
            by_http = ", and asked for the clusters by HTTP," if web_url else ""
            print(f"produced and consumed one message on {topic}{by_http} in {time.monotonic() - started_at:.2f} s")
            return 0
    return 1


if __name__ == "__main__":
    sys.exit(main())
