"""Errors of the tables, each with a text for the operator."""


class TablesError(Exception):
    """The tables cannot be read or changed; the text has the place and the reason."""


class NoTables(TablesError):
    """There are no tables at this root."""


class OtherFormat(TablesError):
    """The tables were written by a newer version of this program, or by one before Delta tables."""


class ChangedMeanwhile(TablesError):
    """Another process changed the table after the version from which this change was computed. Nothing was changed."""
