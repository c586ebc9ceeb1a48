"""Rules of the HTTP reverse proxy: what a request may be, which headers pass, which route and redirect is followed.

They follow RFC 9110 and RFC 9112, and are stricter wherever two servers may read one request differently: such a
request is refused, not repaired. A parser of HTTP/1.1 gives the parts of a head; none of its checks is relied upon.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from urllib.parse import unquote_to_bytes

from proto.addresses import AddressInvalid, parse_host_port
from proto.connect_rules import PROXIES_MAX
from proto.errors import ProtoError

Headers = list[tuple[bytes, bytes]]
"""Headers in the order in which they came, with names in lower case."""

VIA_NAME = b"pulsar-trio-proxy"
"""Name of every proxy of this kind in `Via`."""

ENCODINGS_MAX = 3
"""How many times over a path may be percent-encoded: names of topics hold encoded slashes and percent signs."""

_TOKEN = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_METHOD = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]{1,32}")
_VALUE = re.compile(rb"[\t\x20-\x7e\x80-\xff]*")
_LENGTH = re.compile(rb"[0-9]{1,18}")
_ROLE = re.compile(r"[\x21-\x7e](?:[\x20-\x7e]*[\x21-\x7e])?")
_TARGET = re.compile(rb"[\x21\x22\x24-\x7e]+")  # visible, without the fragment's "#"
_PLAIN_PATH = re.compile(rb"(?:/[0-9A-Za-z_~-][0-9A-Za-z._~-]*)+")
"""A path that all servers read as it is: without empty segments, and with none that begins with a dot."""
_PATH = re.compile(rb"/(?!/)(?:[^%\\]|%[0-9A-Fa-f]{2})*")
_URL = re.compile(rb"(?:(https?):)?//([^/?]*)(.*)", re.IGNORECASE)
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")
_SEGMENT_ENDS = re.compile(rb"[/\\]")
_PARAMETERS = re.compile(r";[^/]*")
_OTHER_SLASH = re.compile(r"\\|%2F|%5C", re.IGNORECASE)
_SLASHES = re.compile(r"//+")
_AMBIGUOUS = re.compile(r"[;\\%]|//")  # what any of the three above may find

_REFUSED_METHODS = frozenset((b"CONNECT", b"TRACE", b"TRACK"))
_DEFAULT_PORTS = {"http": 80, "https": 443}
_REDIRECTS = {301: False, 302: False, 303: False, 307: True, 308: True}

_SINGLE = (b"authorization", b"content-type", b"x-original-principal", b"x-pulsar-auth-method-name")
"""Headers that would mean one thing to the proxy and another to a broker if they came with two values."""

_HOP_BY_HOP = frozenset(
    (b"connection", b"http2-settings", b"keep-alive", b"te", b"trailer", b"transfer-encoding", b"upgrade")
)
_SET_ANEW = frozenset((b"content-length", b"expect", b"host"))
_METHOD_NAME = b"x-pulsar-auth-method-name"
"""It chooses how the broker authenticates the client, and says nothing of who that is."""
_CLAIMS = frozenset(
    b"cf-connecting-ip forwarded proxy true-client-ip x-client-ip x-cluster-client-ip x-real-ip x-rewrite-url".split()
)
"""What only a proxy may say of a client. `Proxy` becomes HTTP_PROXY in a CGI script."""
_CLAIM_PREFIXES = (b"x-forwarded", b"x-original-", b"x-pulsar-auth-")
_NOT_BY_CONNECTION = frozenset((b"authorization", b"via", _METHOD_NAME))
"""What a client cannot take from its request by naming it in `Connection`: the proxy has judged it by these."""


class RequestRefused(ProtoError):
    """A request, or its response, that is refused. ``text`` is for the client, ``reason`` for metrics and logs."""

    def __init__(self, status: int, text: str, reason: str = "") -> None:
        super().__init__(text)
        self.status = status
        self.text = text
        self.reason = reason


@dataclass(frozen=True, slots=True)
class RequestHead:
    """A request that has passed the rules.

    ``target``: path and query, as they go to the broker. ``path``: the path alone, decoded once except for encoded
    slashes, for the choice of a route and for logs, which the query never enters: it may hold a token. ``upgrade``:
    b"websocket" where the client asks for it as RFC 6455 says.
    """

    method: bytes
    target: bytes = field(repr=False)
    path: str
    headers: Headers = field(repr=False)
    http_version: bytes
    has_body: bool
    content_length: int | None
    expects_continue: bool
    upgrade: bytes


@dataclass(frozen=True, slots=True)
class Origin:
    """What the broker is told of the client.

    ``principal``: its role, or empty. ``authorization``: the proxy's own credentials, for a client that sent none.
    """

    client_ip: str
    scheme: str
    principal: str = ""
    authorization: bytes = field(default=b"", repr=False)


@dataclass(frozen=True, slots=True)
class Redirect:
    """Target of a redirect. ``keeps_method``: 307 and 308; the others are for GET and HEAD only."""

    scheme: str
    host: str
    port: int
    target: bytes = field(repr=False)
    keeps_method: bool


def read_request(method: bytes, target: bytes, headers: Headers, http_version: bytes) -> RequestHead:
    """Check a request's head. Raises RequestRefused, with the status for the client."""
    if http_version not in {b"1.0", b"1.1"}:
        raise RequestRefused(505, "The proxy speaks HTTP/1.1 and HTTP/1.0", "bad_version")
    _check_method(method)
    modern = http_version == b"1.1"
    headers = [_clean(name, value, 400) for name, value in headers]
    origin_form, path = _read_target(target)
    _check_host(headers, required=modern)
    for name in _SINGLE:
        header(headers, name)
    _check_circle(headers)
    chunked = _is_chunked(headers, modern=modern)
    content_length = _content_length(headers, 400)
    if chunked and content_length is not None:
        raise RequestRefused(400, "Content-Length and Transfer-Encoding exclude each other", "ambiguous_framing")
    has_body = chunked or bool(content_length)
    expect = header(headers, b"expect")
    if expect is not None and expect.lower() != b"100-continue":
        raise RequestRefused(417, "The proxy knows no expectation but 100-continue", "bad_expectation")
    return RequestHead(
        method=method,
        target=origin_form,
        path=path,
        headers=headers,
        http_version=http_version,
        has_body=has_body,
        content_length=content_length,
        expects_continue=modern and has_body and expect is not None,
        upgrade=_upgrade(headers) if modern and method == b"GET" and not has_body else b"",
    )


def is_repeatable(head: RequestHead) -> bool:
    """Return whether ``read_repeated`` may take its headers as read: none of them depends on the request's line."""
    return (
        head.http_version == b"1.1"
        and head.content_length is None
        and not head.has_body
        and all(name != b"upgrade" for name, _ in head.headers)
    )


def read_repeated(known: RequestHead, method: bytes, target: bytes) -> RequestHead:
    """Check a further request, with the very headers of one that ``is_repeatable``. Raises RequestRefused."""
    _check_method(method)
    origin_form, path = _read_target(target)
    return RequestHead(method, origin_form, path, known.headers, known.http_version, False, None, False, b"")


def _check_method(method: bytes) -> None:
    if not _METHOD.fullmatch(method):
        raise RequestRefused(400, "The method is malformed", "bad_method")
    if method.upper() in _REFUSED_METHODS:
        raise RequestRefused(405, "The proxy does not serve this method", "refused_method")


def header(headers: Headers, name: bytes) -> bytes | None:
    """Return a header's only value, or None. Raises RequestRefused where it has two different ones."""
    return _only(headers, name, 400)


def _only(headers: Headers, name: bytes, status: int) -> bytes | None:
    values = {value for key, value in headers if key == name}
    if len(values) > 1:
        raise RequestRefused(status, f"The header {name.decode('latin-1')} has several values", "ambiguous_header")
    return values.pop() if values else None


def _clean(name: bytes, value: bytes, status: int) -> tuple[bytes, bytes]:
    """Return a header as it may be sent on: no byte of it can end its line, or the next parser's header."""
    if not _TOKEN.fullmatch(name) or not _VALUE.fullmatch(value):
        raise RequestRefused(status, "A header is malformed", "bad_header")
    return name.lower(), value.strip(b" \t")


def _check_host(headers: Headers, *, required: bool) -> None:
    hosts = [value for name, value in headers if name == b"host"]
    if len(hosts) > 1 or (required and not hosts):
        raise RequestRefused(400, "The request has not exactly one header Host", "bad_host")
    if hosts and hosts[0]:
        _read_authority(hosts[0], 400)


def _read_authority(authority: bytes, status: int, default_port: int = 80) -> tuple[str, int]:
    try:
        address = parse_host_port(authority.decode("ascii"), default_port=default_port)
    except (AddressInvalid, UnicodeDecodeError):
        raise RequestRefused(status, "The host is malformed", "bad_host") from None
    return address.host.lower(), address.port


def _check_circle(headers: Headers) -> None:
    passed = b",".join(value for name, value in headers if name == b"via").split(b",")
    if sum(entry.split()[1:2] == [VIA_NAME] for entry in passed) > PROXIES_MAX:
        raise RequestRefused(508, f"The request has passed over {PROXIES_MAX} proxies: it runs in a circle", "loop")


def _is_chunked(headers: Headers, *, modern: bool) -> bool:
    codings = [value for name, value in headers if name == b"transfer-encoding"]
    if not codings:
        return False
    if not modern:
        raise RequestRefused(400, "HTTP/1.0 has no Transfer-Encoding", "bad_framing")
    if len(codings) > 1 or codings[0].lower() != b"chunked":
        raise RequestRefused(501, "The proxy knows no Transfer-Encoding but chunked", "bad_framing")
    return True


def _content_length(headers: Headers, status: int) -> int | None:
    length = _only(headers, b"content-length", status)
    if length is None:
        return None
    if not _LENGTH.fullmatch(length):
        raise RequestRefused(status, "The Content-Length is malformed", "bad_framing")
    return int(length)


def connection_options(headers: Headers) -> frozenset[bytes]:
    """Return what ``Connection`` names, in lower case."""
    values = (value for name, value in headers if name == b"connection")
    return frozenset(option.strip(b" \t").lower() for value in values for option in value.split(b","))


def _upgrade(headers: Headers) -> bytes:
    asked = (header(headers, b"upgrade") or b"").lower()
    proper = header(headers, b"sec-websocket-key") and header(headers, b"sec-websocket-version") == b"13"
    return asked if asked == b"websocket" and proper and b"upgrade" in connection_options(headers) else b""


def _read_target(target: bytes) -> tuple[bytes, str]:
    """Return a target in origin form, and its path."""
    if not _TARGET.fullmatch(target):
        raise RequestRefused(400, "The request's target is malformed", "bad_target")
    url = _URL.fullmatch(target)
    if url and url[1]:
        _read_authority(url[2], 400)
        target = _rooted(url[3])
    return target, _read_path(target.partition(b"?")[0])


def _read_path(raw: bytes) -> str:
    if _PLAIN_PATH.fullmatch(raw):  # most are: it is what the rest would return, at a fifth of the cost
        return raw.decode("ascii")
    if not _PATH.fullmatch(raw):
        raise RequestRefused(400, "The path is malformed", "bad_path")
    _check_segments(raw)
    try:
        path = unquote_to_bytes(re.sub(rb"%2[fF]", b"%252F", raw)).decode()
    except UnicodeDecodeError:
        raise RequestRefused(400, "The path is not UTF-8", "bad_path") from None
    if _CONTROL.search(path):
        raise RequestRefused(400, "The path has control characters", "bad_path")
    return path


def _check_segments(path: bytes) -> None:
    """Refuse a path with a segment that is `.` or `..` to anybody, however often he decodes it."""
    for _ in range(ENCODINGS_MAX + 1):
        # A servlet container cuts ";parameters" off before it looks at a segment.
        if any(segment.partition(b";")[0] in {b".", b".."} for segment in _SEGMENT_ENDS.split(path)):
            raise RequestRefused(400, "The path has dot segments", "dot_segments")
        decoded = unquote_to_bytes(path)
        if decoded == path:
            return
        path = decoded
    raise RequestRefused(400, f"The path is encoded more than {ENCODINGS_MAX} times over", "encoded_too_often")


def upstream_headers(head: RequestHead, origin: Origin, host: bytes, *, upgrade: bool = False) -> Headers:
    """Return a request's headers for ``host``, a broker's authority, without `Expect`. Raises RequestRefused.

    ``upgrade``: let the client's upgrade through, for a caller that can give the connection away.
    """
    if origin.principal and not _ROLE.fullmatch(origin.principal):
        raise RequestRefused(403, "The client's role cannot be told to a broker in a header", "bad_role")
    # Without a client's role the broker would take the client for the proxy.
    own = bool(origin.authorization and origin.principal) and not header(head.headers, b"authorization")
    dropped = connection_options(head.headers) - _NOT_BY_CONNECTION
    if own:
        dropped |= {b"authorization", _METHOD_NAME}
    passed = [(name, value) for name, value in head.headers if name not in dropped and _passes_upstream(name)]
    client_host = header(head.headers, b"host")
    added = [
        (b"x-forwarded-for", origin.client_ip.encode()),
        (b"x-forwarded-proto", origin.scheme.encode()),
        *([(b"x-forwarded-host", client_host)] if client_host else []),
        *([(b"x-original-principal", origin.principal.encode())] if origin.principal else []),
        *([(b"authorization", origin.authorization)] if own else []),
        (b"via", head.http_version + b" " + VIA_NAME),
        *([(b"connection", b"upgrade"), (b"upgrade", head.upgrade)] if upgrade and head.upgrade else []),
    ]
    if head.content_length is not None:
        added.append((b"content-length", b"%d" % head.content_length))
    elif head.has_body:
        added.append((b"transfer-encoding", b"chunked"))
    return [_clean(name, value, 502) for name, value in [(b"host", host), *passed, *added]]


def _passes_upstream(name: bytes) -> bool:
    name = name.replace(b"_", b"-")  # WSGI and CGI take them for the same
    if name in _HOP_BY_HOP or name in _SET_ANEW or name in _CLAIMS or name.startswith(b"proxy-"):
        return False
    return name == _METHOD_NAME or not name.startswith(_CLAIM_PREFIXES)


def downstream_headers(headers: Headers, extra: Headers) -> Headers:
    """Return a response's headers for the client, with ``extra`` in place of equal ones. Raises RequestRefused.

    A length is dropped where the body came in chunks.
    """
    headers = [_clean(name, value, 502) for name, value in headers]
    extra = [_clean(name, value, 502) for name, value in extra]
    dropped = connection_options(headers) | _HOP_BY_HOP | {name for name, _ in extra} | {b"content-length"}
    passed = [one for one in headers if one[0] not in dropped and not one[0].startswith(b"proxy-")]
    length = _content_length(headers, 502)
    if length is not None and not any(name == b"transfer-encoding" for name, _ in headers):
        passed.append((b"content-length", b"%d" % length))
    return passed + extra


def redirect_of(status: int, headers: Headers, base: tuple[str, str, int]) -> Redirect | None:
    """Return the redirect that a response of ``base`` (scheme, host, port) asks for, or None.

    Raises RequestRefused where its Location is malformed, or leads from TLS to plain text.
    """
    location = _only(headers, b"location", 502) if status in _REDIRECTS else None
    if location is None:
        return None
    scheme, host, port = base
    target = location.partition(b"#")[0]
    if url := _URL.fullmatch(target):
        scheme = url[1].decode().lower() if url[1] else scheme
        host, port = _read_authority(url[2], 502, _DEFAULT_PORTS[scheme])
        target = _rooted(url[3])
    if base[0] == "https" and scheme != "https":
        raise RequestRefused(502, "The broker redirects from TLS to plain text", "redirect_downgrade")
    try:
        _read_target(target)
    except RequestRefused:
        raise RequestRefused(502, "The broker redirects to a malformed address", "bad_redirect") from None
    return Redirect(scheme, host, port, target, _REDIRECTS[status])


def _rooted(target: bytes) -> bytes:
    return target if target.startswith(b"/") else b"/" + target


class Routes:
    """Table from prefixes of paths, on whole segments, to names of upstreams. The longest prefix counts."""

    def __init__(self, routes: Sequence[tuple[str, str]]) -> None:
        self._names = {tuple(filter(None, prefix.split("/"))): name for prefix, name in routes}
        self._longest = max(map(len, self._names), default=0)

    def find(self, path: str) -> str | None:
        """Return the upstream of a RequestHead's path, or None.

        Raises RequestRefused where a server that decodes slashes, joins them, or drops the segments' parameters would
        choose another one: the route decides who authorizes the request.
        """
        if not _AMBIGUOUS.search(path):  # all readings are one
            return self._find(path)
        bare = _PARAMETERS.sub("", path)
        split = _OTHER_SLASH.sub("/", path)
        readings = {path, bare, split, _OTHER_SLASH.sub("/", bare), _PARAMETERS.sub("", split)}
        found = {self._find(one) for reading in readings for one in (reading, _SLASHES.sub("/", reading))}
        if len(found) > 1:
            raise RequestRefused(400, "The path is ambiguous", "ambiguous_path")
        return found.pop()

    def _find(self, path: str) -> str | None:
        segments = tuple(path.split("/", self._longest + 1)[1 : self._longest + 1])
        while (name := self._names.get(segments)) is None and segments:
            segments = segments[:-1]
        return name
