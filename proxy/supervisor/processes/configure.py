"""Reconfiguration of running workers: all of them take a new configuration over, or none.

The admin worker has no vote.
"""

from collections.abc import Iterable, Mapping

import trio

from proto.roles import Role
from proto.rpc_pb2 import ConfigureRequest, FileStamp, Method, TakeOverFilesRequest
from proxy.common.errors import ProxyError
from proxy.common.logs import get_logger
from proxy.config.trial import broker_files
from proxy.config.types import Config
from proxy.config.worker_config import encode_config, without_secrets
from proxy.runtime.rpc.errors import RpcCallRefused, RpcConnectionLost, RpcError
from proxy.supervisor.processes.worker_process import WorkerProcess

CONFIGURE_TIMEOUT_S = 10.0


class ReloadRefused(ProxyError):
    """A new configuration was not taken over, and the old one is still in force. The text is the reason."""


def encode_config_for(role: Role, config: Config) -> bytes:
    """Encode the part of a configuration that a worker of a role may know: secrets are for auth workers alone."""
    return encode_config(config if role is Role.AUTH else without_secrets(config))


async def configure_all(workers: Iterable[WorkerProcess], old: Config, new: Config) -> None:
    """Give workers a new configuration; where one refuses, give the others the old one back and raise ReloadRefused."""
    changed: list[WorkerProcess] = []
    for worker in workers:
        try:
            await _configure(worker, new)
        except RpcError as error:
            if not isinstance(error, RpcCallRefused):
                worker.kill()  # unknown whether it took the configuration, or will once it wakes up
            await configure_or_kill(changed, old)
            raise ReloadRefused(f"the {worker.role} worker with pid {worker.pid} refused it: {error.reason}") from None
        changed.append(worker)


async def configure_or_kill(workers: Iterable[WorkerProcess], config: Config) -> None:
    """Give a configuration to workers without a vote on it; kill one that refuses, its successor starts with it.

    Those are admin workers, since they read unauthenticated input, and where a reload is taken back all.
    """
    for worker in workers:
        try:
            await _configure(worker, config)
        except RpcError as error:
            get_logger().error(
                "a worker did not take over a configuration; ending it", pid=worker.pid, reason=str(error)
            )
            worker.kill()


async def configure_replaced(workers: Iterable[WorkerProcess], config: Config) -> None:
    """Give a new configuration to replaced forwarders, for their remaining relays; to all of them concurrently.

    They have no vote on the reload: one may end at any moment, or run another version of the program.
    """
    async with trio.open_nursery() as nursery:
        for worker in workers:
            nursery.start_soon(_configure_replaced, worker, config)


async def _configure_replaced(worker: WorkerProcess, config: Config) -> None:
    try:
        await _configure(worker, config)
    except RpcConnectionLost:
        pass  # it has ended, and its relays with it
    except RpcError as error:
        get_logger().warning(
            "a replaced forwarder did not take over the configuration; the relays that it still has keep the old one",
            pid=worker.pid,
            reason=str(error),
        )


async def take_over_files(
    workers: Iterable[WorkerProcess], config: Config, stamps: Mapping[str, str]
) -> dict[WorkerProcess, RpcError]:
    """Have workers take over changed files of ``brokers``, all of them concurrently; return which did not, and why."""
    failures: dict[WorkerProcess, RpcError] = {}

    async def tell(worker: WorkerProcess) -> None:
        files = broker_files(config, with_credentials=worker.role is Role.AUTH)
        request = TakeOverFilesRequest(files=[FileStamp(path=file, stamp=stamps[file]) for file in files])
        try:
            await worker.send_command(Method.TAKE_OVER_FILES, request, timeout_s=CONFIGURE_TIMEOUT_S)
        except RpcConnectionLost:
            pass  # it has ended, and its successor reads the files
        except RpcError as error:
            failures[worker] = error

    async with trio.open_nursery() as nursery:
        for worker in workers:
            nursery.start_soon(tell, worker)
    return failures


async def _configure(worker: WorkerProcess, config: Config) -> None:
    request = ConfigureRequest(config=encode_config_for(worker.role, config))
    await worker.send_command(Method.CONFIGURE, request, timeout_s=CONFIGURE_TIMEOUT_S)
