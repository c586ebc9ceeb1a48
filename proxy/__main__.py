"""The command ``pulsar-trio-proxy``, also as ``python -m proxy``."""

from proxy.runtime.process.hardening import harden_process


def run() -> None:
    """Harden the process, then do what the command line says.

    Secrets are read by ``check``, too, which the supervisor runs in the midst of its workers; so nothing is imported or
    read before.
    """
    harden_process()
    from proxy.cli import main

    main(prog_name="pulsar-trio-proxy")


if __name__ == "__main__":
    run()
