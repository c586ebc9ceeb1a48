"""A realm of our own: a KDC on loopback, keytabs, what Java needs to know of it, and a client of raw tokens."""

from __future__ import annotations

import importlib.util
import os
import secrets
import shutil
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from local.ports import free_port
from local.process import OwnedProcess

from .programs import NotAvailableError

REALM = "PULSAR.TEST"
ALICE, BOB, PROXY, BROKER = (f"{name}@{REALM}" for name in ("alice", "bob", "proxy/localhost", "broker/localhost"))
_START_TIMEOUT_S = 60.0

_KRB5_CONF = """
[libdefaults]
 default_realm = {realm}
 dns_lookup_realm = false
 dns_lookup_kdc = false
 dns_canonicalize_hostname = false
 rdns = false
 udp_preference_limit = 1
[realms]
 {realm} = {{
  kdc = 127.0.0.1:{port}
 }}
"""

_KDC_CONF = """
[kdcdefaults]
 kdc_listen = 127.0.0.1:{port}
 kdc_tcp_listen = 127.0.0.1:{port}
[realms]
 {realm} = {{
  database_name = {directory}/principal
  key_stash_file = {directory}/stash
  acl_file = {directory}/kadm5.acl
  max_life = 24h
  supported_enctypes = aes256-cts-hmac-sha1-96:normal
 }}
[logging]
 kdc = FILE:{directory}/kdc.log
"""

_JAAS_SECTION = """
{section} {{
  com.sun.security.auth.module.Krb5LoginModule required
  useKeyTab=true storeKey=true useTicketCache=false doNotPrompt=true
  keyTab="{keytab}" principal="{principal}";
}};
"""


class Realm:
    """A KDC with our four principals. Its tools and ours find it by ``environment``."""

    def __init__(self, directory: Path) -> None:
        tools = ("krb5kdc", "kdb5_util", "kadmin.local")
        self._tools = {name: shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin") for name in tools}
        lacking = [name for name, path in self._tools.items() if path is None]
        if importlib.util.find_spec("gssapi") is None:
            lacking.append("the Python package gssapi")
        if lacking:
            raise NotAvailableError(f"this machine lacks {', '.join(lacking)}")
        self.directory = directory
        self.krb5_conf, self.jaas_conf = directory / "krb5.conf", directory / "jaas.conf"
        self.environment = {"KRB5_CONFIG": str(self.krb5_conf), "KRB5_KDC_PROFILE": str(directory / "kdc.conf")}
        self.port = free_port()
        self._process: OwnedProcess | None = None
        names = {"realm": REALM, "port": self.port, "directory": directory}
        self.krb5_conf.write_text(_KRB5_CONF.format(**names))
        (directory / "kdc.conf").write_text(_KDC_CONF.format(**names))
        (directory / "kadm5.acl").touch()
        sections = {"Alice": ALICE, "Bob": BOB, "PulsarBroker": BROKER}
        self.jaas_conf.write_text(
            "".join(
                _JAAS_SECTION.format(section=section, keytab=self.keytab(principal), principal=principal)
                for section, principal in sections.items()
            )
        )

    def keytab(self, principal: str) -> Path:
        """The file with a principal's key."""
        return self.directory / f"{principal.partition('@')[0].replace('/', '-')}.keytab"

    @property
    def jvm_options(self) -> Sequence[str]:
        """What a JVM must be told."""
        return (
            f"-Djava.security.auth.login.config={self.jaas_conf}",
            f"-Djava.security.krb5.conf={self.krb5_conf}",
        )

    def __enter__(self) -> Self:
        self._run("kdb5_util", "create", "-r", REALM, "-s", "-P", secrets.token_hex(16))
        commands = []
        for principal in (ALICE, BOB, PROXY, BROKER):
            commands += [f"addprinc -randkey {principal}", f"ktadd -k {self.keytab(principal)} {principal}"]
        self._run("kadmin.local", input_text="\n".join(commands) + "\n")
        command = [str(self._tools["krb5kdc"]), "-n", "-P", str(self.directory / "kdc.pid")]
        self._process = OwnedProcess(command, log=self.directory / "kdc.out", env=os.environ | self.environment)
        self._wait(self._process)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process is not None:
            self._process.stop(5.0)

    def _wait(self, process: OwnedProcess) -> None:
        """Until it listens: it says so after it does."""
        log, deadline = self.directory / "kdc.log", time.monotonic() + _START_TIMEOUT_S
        while not (log.exists() and "commencing operation" in log.read_text()):
            if process.exit_code() is not None or time.monotonic() > deadline:
                process.kill()
                raise AssertionError(f"the KDC does not start:\n{process.log_tail()}")
            time.sleep(0.02)

    def _run(self, tool: str, *arguments: str, input_text: str = "") -> None:
        command = [str(self._tools[tool]), *arguments]
        environment = os.environ | self.environment
        result = subprocess.run(
            command, input=input_text, capture_output=True, text=True, timeout=60, check=False, env=environment
        )
        assert result.returncode == 0, f"{tool}: {result.stdout}{result.stderr}"


class Initiator:
    """A client of RFC 4752 as the tests want it, legal or not. It finds the realm by this process' KRB5_CONFIG."""

    def __init__(
        self,
        realm: Realm,
        principal: str = ALICE,
        *,
        service: str = PROXY,
        mutual: bool = False,
        choice: bytes = b"\x01\x00\x00\x00",
        authorization_identity: str | None = None,
    ) -> None:
        import gssapi

        def name(text: str) -> gssapi.Name:
            return gssapi.Name(text, gssapi.NameType.kerberos_principal)

        flags = gssapi.RequirementFlag
        store: Any = {"client_keytab": f"FILE:{realm.keytab(principal)}", "ccache": f"MEMORY:{principal}"}
        self._context = gssapi.SecurityContext(
            name=name(service),
            creds=gssapi.Credentials(name=name(principal), usage="initiate", store=store),
            usage="initiate",
            mech=gssapi.MechType.kerberos,
            flags=flags.integrity | (flags.mutual_authentication if mutual else flags.integrity),
        )
        self._choice = choice + (principal if authorization_identity is None else authorization_identity).encode()

    def step(self, challenge: bytes | None = None) -> bytes:
        """The data for CONNECT, then for each challenge."""
        if not self._context.complete:
            return self._context.step(challenge) or b""
        offer = self._context.unwrap(challenge or b"").message
        assert offer == b"\x01\x00\x00\x00", offer
        return self._context.wrap(self._choice, False).message
