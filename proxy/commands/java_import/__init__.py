"""The command ``import``: turns the configuration of Pulsar's Java proxy into this proxy's.

``properties`` reads it as Java does, ``keys`` says of each of its keys what becomes of it, ``groups`` and ``http`` make
what needs several keys together, ``result`` collects and writes TOML. ``helm`` does the same with values of charts.
"""
