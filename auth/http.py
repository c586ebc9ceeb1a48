"""HTTP client for issuers of tokens: what OpenID Connect's discovery, keys and token endpoints need, and no more.

Bounded in time and in size, and never redirected: no redirect is followed, and every URL is checked by the same rule,
whether the configuration or an issuer's answer has it. HTTP proxies come from the environment (``HTTPS_PROXY``,
``NO_PROXY``), as operators behind one need it; credentials never do (httpx reads no ``.netrc`` unless it is configured
to).
"""

import re
import ssl
from collections.abc import Iterator
from typing import Literal, TypeVar

import httpx
import msgspec
import trio

from auth.errors import AuthError
from proxy.common.errors import ConfigError
from proxy.common.networks import is_loopback
from proxy.common.reloading_file import ReloadingFile
from proxy.runtime.loop.tasks import seconds
from proxy.runtime.network.certificate_ends import read_ends
from proxy.runtime.network.tls import new_client_context

ANSWER_BYTES_MAX = 1024 * 1024
DETAIL_CHARACTERS_MAX = 200

PlainHttp = Literal["nowhere", "at loopback", "anywhere"]
"""Where HTTP without TLS is allowed."""

AnswerT = TypeVar("AnswerT")

DISCOVERY_PATH = "/.well-known/openid-configuration"
_ERROR_CODE = re.compile(r"[a-z_]{1,40}")  # RFC 6749, section 5.2, and those who extend it


class HttpFailed(AuthError):
    """No answer, or none that is of use; says why, without what was sent."""


class _Refusal(msgspec.Struct):
    error: str = ""


class IssuerClient:
    """HTTP client without connections to keep: issuers are asked a few times an hour.

    ``trust``: PEM file with the trusted authorities, read again when it changes; empty: the system's. ``key``: the
    configuration's, for errors. Raises ConfigError. ``transport`` replaces the network in tests.
    """

    def __init__(
        self,
        key: str,
        *,
        trust: str,
        timeout_ms: int,
        plain_http: PlainHttp,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self._timeout_s = seconds(timeout_ms)
        self._plain_http = plain_http
        self._transport = transport
        self._tls = ReloadingFile(key, [trust], lambda: _tls_context(key, trust), lambda: read_ends([(key, trust)]))

    async def get_json(self, url: str, kind: type[AnswerT], *, bearer: str = "") -> AnswerT:
        """Ask for JSON; raises HttpFailed. ``bearer``: token for the URL's server, which is then asked directly."""
        return await self._request_json("GET", url, kind, None, bearer)

    async def post_form(self, url: str, kind: type[AnswerT], form: dict[str, str]) -> AnswerT:
        """Send a form, for which JSON is the answer; raises HttpFailed."""
        return await self._request_json("POST", url, kind, form, "")

    async def _request_json(
        self, method: str, url: str, kind: type[AnswerT], form: dict[str, str] | None, bearer: str
    ) -> AnswerT:
        host = _allowed_host(url, self._plain_http)
        shown = _printable(url)
        headers = _HEADERS | ({"authorization": f"Bearer {bearer}"} if bearer else {})
        tls = await self._tls.current_value()
        try:
            with trio.fail_after(self._timeout_s):
                client = httpx.AsyncClient(
                    verify=tls,
                    transport=self._transport,
                    timeout=None,  # noqa: S113 -- ours is over all
                    follow_redirects=False,
                    trust_env=not (bearer or is_loopback(host)),  # no proxy elsewhere can reach what is here
                )
                async with client, client.stream(method, url, data=form, headers=headers) as response:
                    body = await _bounded_body(response)
        except trio.TooSlowError:
            raise HttpFailed(f"{shown}: no answer within {self._timeout_s:g} s") from None
        except HttpFailed as failure:
            raise HttpFailed(f"{shown}: {failure}") from None
        except _FAILURES as error:
            raise HttpFailed(f"{shown}: {_detail(error)}") from None
        if response.status_code != httpx.codes.OK:
            raise HttpFailed(f"{shown}: answered with status {response.status_code}{_error_code(body)}")
        try:
            return msgspec.json.decode(body, type=kind, strict=False)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:  # whose texts quote no values
            raise HttpFailed(f"{shown}: {_printable(str(error))}") from None


def discovery_url(issuer: str) -> str:
    """Where an issuer describes itself (OpenID Connect Discovery 1.0, section 4.1)."""
    return issuer.removesuffix("/") + DISCOVERY_PATH


_HEADERS = {"accept-encoding": "identity"}
"""A small answer that unpacks to a huge one would be past the bound before it could be seen: nothing is packed."""

# A proxy's address from the environment may be no address, or need a library that is not there.
_FAILURES = (httpx.HTTPError, httpx.StreamError, httpx.InvalidURL, OSError, ValueError, ImportError)


async def _bounded_body(response: httpx.Response) -> bytes:
    if response.headers.get("content-encoding", "identity") != "identity":
        raise HttpFailed("the answer is packed, which was not asked for")
    body = bytearray()
    with trio.CancelScope() as reading:
        async for data in response.aiter_bytes():
            body += data
            if len(body) > ANSWER_BYTES_MAX:
                reading.cancel()  # to leave the loop would leave httpx's generators, one within the other, unfinished
    if len(body) > ANSWER_BYTES_MAX:
        raise HttpFailed(f"an answer of more than {ANSWER_BYTES_MAX} bytes")
    return bytes(body)


def _allowed_host(url: str, plain_http: PlainHttp) -> str:
    """Return the host of a URL that may be requested; raise HttpFailed."""
    try:
        parsed = httpx.URL(url)
    except (httpx.InvalidURL, ValueError):
        raise HttpFailed("an address that is none") from None
    if not parsed.host or parsed.userinfo:
        raise HttpFailed("an address without a host, or with a password in it")
    plain = plain_http == "anywhere" or (plain_http == "at loopback" and is_loopback(parsed.host))
    if parsed.scheme != "https" and not (parsed.scheme == "http" and plain):
        raise HttpFailed(f"{_printable(url)}: is not https")
    return parsed.host


def _tls_context(key: str, trust: str) -> ssl.SSLContext:
    try:
        return new_client_context(trust)
    except ssl.SSLError as error:
        raise ConfigError(f"{key}: {trust} holds no certificates: {error.reason}") from None


def _error_code(body: bytes) -> str:
    """Return the error code of a token endpoint's refusal, if it has RFC 6749's form; else an empty text."""
    try:
        code = msgspec.json.decode(body, type=_Refusal).error
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return ""
    return f" ({code})" if _ERROR_CODE.fullmatch(code) else ""


def _detail(error: BaseException) -> str:
    """Return the text of the innermost error that has one: httpx's own error for a bad certificate has none."""
    text = next((str(cause) for cause in reversed([*_causes(error)]) if str(cause)), "")
    return _printable(f"{type(error).__name__}: {text}" if text else type(error).__name__)


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _printable(text: str) -> str:
    return "".join(one for one in text[:DETAIL_CHARACTERS_MAX] if one.isprintable())
