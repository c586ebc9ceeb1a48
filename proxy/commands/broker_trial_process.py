"""Process of a trial. It is hardened before the imports: the configuration, with its secrets, waits in a pipe then."""

from proxy.runtime.process import hardening

if __name__ == "__main__":
    hardening.restrict_process(hardening.DATA_WORKER_OOM_SCORE)
    from proxy.commands.broker_trial import main

    main()
