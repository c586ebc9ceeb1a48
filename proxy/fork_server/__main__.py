"""The fork server's process, started by the supervisor. ``--channel``: the descriptor of its socket."""

from proxy.runtime.process import hardening

if __name__ == "__main__":
    hardening.restrict_process(0)
    from proxy.fork_server.server import main

    main()
