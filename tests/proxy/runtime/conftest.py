"""Fixtures and fakes of this room; pytest puts this folder on the path for the folders below."""
