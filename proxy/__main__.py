"""``python -m proxy`` is the command ``pulsar-trio-proxy``."""

from proxy.cli import main

if __name__ == "__main__":
    main(prog_name="pulsar-trio-proxy")
