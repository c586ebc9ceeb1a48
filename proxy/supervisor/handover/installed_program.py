"""Check of the program that is installed now, which an exec would run, and new worker processes do."""

from pathlib import Path

import trio

from proxy.supervisor.handover.exec_handover import check_command_line
from proxy.supervisor.processes.children import child_reaper

CHECK_TIMEOUT_S = 30.0


async def installed_program_fault(config_file: Path) -> str:
    """Run the installed program's ``check``; return what is wrong with it, or with the configuration; "" if nothing."""
    with trio.move_on_after(CHECK_TIMEOUT_S):
        try:
            with child_reaper.pause_while_spawning():  # its process id is not known here
                command = check_command_line(config_file)
                done = await trio.run_process(command, capture_stdout=True, capture_stderr=True, check=False)
        except OSError as error:
            return f"the program that is installed now cannot be run: {error}"
        if done.returncode:
            return f"the program that is installed now fails: {done.stderr.decode().strip()[-500:]}"
        return ""
    return "the program that is installed now does not answer"
