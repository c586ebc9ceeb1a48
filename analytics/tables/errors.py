"""Errors of the tables, each with a text for the operator."""

from collections.abc import Iterator
from contextlib import contextmanager

from deltalake.exceptions import CommitFailedError, DeltaError

from analytics.errors import AnalyticsError


class TablesError(AnalyticsError):
    """The tables cannot be read or changed; the text has the place and the reason."""


class NoTables(TablesError):
    """There are no tables at this root."""


class OtherFormat(TablesError):
    """The tables were written by a newer version of this program, or by one before Delta tables."""


class ChangedMeanwhile(TablesError):
    """Another process changed the table after the version from which this change was computed. Nothing was changed."""


@contextmanager
def change_errors(table: str) -> Iterator[None]:
    """Turn delta-rs' errors into ChangedMeanwhile, if another process was faster, else TablesError."""
    try:
        yield
    except CommitFailedError as error:
        raise ChangedMeanwhile(f"another process changed {table} meanwhile; nothing was changed") from error
    except DeltaError as error:
        raise TablesError(f"{table}: {error}") from error
