"""The fork server's process, started by the supervisor. ``--channel``: the descriptor of its socket."""

from proxy.runtime.process import hardening

if __name__ == "__main__":
    hardening.harden_process()
    hardening.confine_process()
    from proxy.fork_server.server import main

    main()
