"""Import all kinds of workers once, then fork a worker for each of the supervisor's requests.

Workers that are forked share what they import: memory, and the time of a start. For that, this process must be no way
into a worker: it has one thread and no event loop, opens no file after its imports, is given no secret, and reads
nothing but the supervisor's socket. What it makes up itself are the keys of the forwarders' session tickets
(proxy.runtime.network.session_tickets). It ends when the supervisor closes that socket, or dies.

All workers of one fork server have its layout of addresses and its seed of string hashes. Python's ``random`` and
OpenSSL's generator notice a fork by themselves.
"""

import contextlib
import gc
import os
import pkgutil
import signal
import socket
import sys
from importlib import import_module

import dns.rdata
import setproctitle

import auth.providers
from proto.roles import Role
from proxy.common.errors import ConfigError
from proxy.runtime.network import session_tickets
from proxy.runtime.observability.process_metrics import ProcessMetrics
from proxy.runtime.process import hardening, limits, seccomp
from proxy.runtime.process.descriptors import Descriptors
from proxy.runtime.process.fork_request import DESCRIPTORS_MAX, READY, REQUEST_BYTES_MAX, ForkReply, ForkRequest
from proxy.runtime.process.worker import Confinement, run_worker

SERVICES = {
    Role.ADMIN: ("proxy.admin.service", "AdminService", hardening.WORKER_OOM_SCORE),
    Role.AUTH: ("auth.service", "AuthService", hardening.WORKER_OOM_SCORE),
    Role.LOOKUP: ("lookup.service", "LookupService", hardening.DATA_WORKER_OOM_SCORE),
    Role.HTTP: ("proxy.http.service", "HttpService", hardening.DATA_WORKER_OOM_SCORE),
    Role.FORWARDER: ("proxy.forwarder.service", "ForwarderService", hardening.DATA_WORKER_OOM_SCORE),
}
"""Module and name of each role's service, and what is added to its OOM score."""

LATE_IMPORTS = (
    *("dns._trio_backend", "encodings.idna", "httpcore._backends.trio", "idna.uts46data"),
    # json.loads takes bytes for one of these by their beginning; PyJWT calls it with shared secrets, which are random.
    *("encodings.utf_8_sig", "encodings.utf_16", "encodings.utf_16_be", "encodings.utf_16_le"),
    *("encodings.utf_32", "encodings.utf_32_be", "encodings.utf_32_le"),
)
"""What libraries import when they need it; a worker can read no module's file."""

PROVIDERS = (
    *(f"auth.providers.{module.name}" for module in pkgutil.iter_modules(auth.providers.__path__)),
    "auth.broker_oauth2",
    "auth.broker_sasl",
)
"""What an auth worker imports by its configuration."""


def main() -> None:
    """Serve the supervisor; in a process that was forked, run the worker."""
    channel = socket.socket(fileno=int(sys.argv[sys.argv.index("--channel") + 1]))
    channel.set_inheritable(False)
    # The thread of the supervisor that started this process may have signals blocked.
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    set_title("fork server")
    import_all()
    session_tickets.make_shared_fronts()
    gc.collect()
    gc.freeze()
    forked = None
    with contextlib.suppress(ConnectionError):  # the supervisor has gone
        channel.send(READY)
        forked = serve(channel)
    channel.close()
    if forked is not None:
        request, descriptors = forked
        if request.role is not Role.FORWARDER:
            session_tickets.drop_shared_fronts()
        module, name, oom_score = SERVICES[request.role]
        os.setpgid(0, 0)  # signals to the supervisor's group, as Ctrl-C, are for the supervisor alone
        process_metrics = ProcessMetrics()  # which opens files
        is_in_landlock = hardening.restrict_fork(oom_score, request.files)
        limits.limit_open_files(request.role)
        confinement = Confinement(landlock=is_in_landlock, seccomp=seccomp.refuse_system_calls(request.role))
        set_title(request.role.value)
        run_worker(request.role, getattr(import_module(module), name), descriptors, confinement, process_metrics)


def set_title(what: str) -> None:
    """Name this process in the lists of processes."""
    setproctitle.setproctitle(f"pulsar-trio-proxy: {what}")


def import_all() -> None:
    """Import the services of all roles, and the authentication providers that can be imported here."""
    for module, _, _ in SERVICES.values():
        import_module(module)
    for module in LATE_IMPORTS:
        import_module(module)
    dns.rdata.load_all_types()  # type: ignore[no-untyped-call]
    for module in PROVIDERS:
        with contextlib.suppress(ConfigError):  # Kerberos' library is missing
            import_module(module)


def serve(channel: socket.socket) -> tuple[ForkRequest, Descriptors] | None:
    """Fork a worker for each request. Return None once the supervisor has gone; in a worker, its request and
    descriptors.

    Raises ConnectionError where the supervisor has gone before it had the reply.
    """
    while True:
        data, passed, _, _ = socket.recv_fds(channel, REQUEST_BYTES_MAX, DESCRIPTORS_MAX, socket.MSG_CMSG_CLOEXEC)
        if not data:
            return None
        request = ForkRequest.decode(data)
        try:
            pid = fork_to_grandparent()
        except OSError as error:
            reply = ForkReply(error=error.errno or 0)
        else:
            if pid == 0:
                return request, Descriptors(**dict(zip(request.names, passed, strict=True)))
            reply = ForkReply(pid=pid)
        for descriptor in passed:
            os.close(descriptor)
        channel.send(reply.encode())


def fork_to_grandparent() -> int:
    """Fork a child of this process's subreaper; return its process id, or 0 in the child.

    By a process between the two that ends at once. The child goes on when that has ended, so that its parent is the
    subreaper from its first line on. Raises OSError.
    """
    ours, theirs = socket.socketpair()
    with ours, theirs:
        between = os.fork()
        if between == 0:
            _fork_and_end()
            ours.close()
            theirs.send(str(os.getpid()).encode())
            theirs.recv(1)  # ends when the parent has seen the end of the process between
            return 0
        theirs.close()
        pid = ours.recv(20)  # nothing where the process between could not fork
        _, status = os.waitpid(between, 0)
        if not pid:
            number = os.waitstatus_to_exitcode(status)
            raise OSError(number, os.strerror(number))
        return int(pid)


def _fork_and_end() -> None:
    """Fork, and end this process: only the child returns."""
    number = 0
    try:
        if os.fork() == 0:
            return
    except OSError as error:
        number = error.errno or 1
    os._exit(number)
