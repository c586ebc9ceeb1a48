"""Trials of settings at brokers, in a child process of their own (proxy.commands.broker_trial).

Not in the supervisor, which reads no secret file and nothing that a broker sends; nor in a worker: a lookup worker has
no credentials but those that auth workers give it, which are those in force.
"""

import os
import subprocess
import sys

import msgspec
import trio

from proxy.common.errors import ProxyError
from proxy.config.load import worker_environment
from proxy.config.trial import TRIAL_TIMEOUT_S, BrokerTrial
from proxy.config.types import Config
from proxy.config.worker_config import encode_config
from proxy.supervisor.processes.children import child_reaper

COMMAND = (sys.executable, "-P", "-m", "proxy.commands.broker_trial_process")

START_GRACE_S = 10.0
"""Time beyond the trial's own, for a busy machine to start the process."""


class TrialNotRun(ProxyError):
    """The trial came to no result, which says nothing of the settings. The text is the reason."""


async def _kill(process: trio.Process) -> None:
    """End it at once. SIGTERM may be blocked in it (proxy.supervisor.config_watch), and nothing may wait for that."""
    process.kill()


async def run_trial(config: Config, command: tuple[str, ...] = COMMAND) -> BrokerTrial:
    """Try a configuration, with the present content of its files. Raises TrialNotRun."""
    with trio.move_on_after(TRIAL_TIMEOUT_S + START_GRACE_S):
        try:
            with child_reaper.pause_while_spawning():  # its process id is not known here
                done = await trio.run_process(
                    command,
                    stdin=encode_config(config),
                    capture_stdout=True,
                    stderr=subprocess.DEVNULL,
                    check=False,
                    env=worker_environment(os.environ),
                    process_group=0,  # Ctrl-C must reach the supervisor alone
                    deliver_cancel=_kill,
                )
            return msgspec.json.decode(done.stdout, type=BrokerTrial)
        except OSError as error:
            raise TrialNotRun(f"it cannot be started: {error.strerror}") from None
        except msgspec.MsgspecError:
            raise TrialNotRun(f"it ended with code {done.returncode}") from None
    raise TrialNotRun("it did not end in time")
