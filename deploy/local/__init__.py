"""What runs the project on one machine: prerequisites, environment, a real Pulsar broker, the cluster.

Standard library only: these modules run under the system's Python before any virtual environment exists.
They are imported with `deploy` on the path (`PYTHONPATH=deploy python3 -m local.run`).
"""
