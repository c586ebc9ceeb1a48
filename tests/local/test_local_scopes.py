"""How tests are handed out to processes (tests/conftest.py)."""

from tests.conftest import LONG, SHARING, scope_of
from tests.e2e.conftest import HERE, MEASURED


def test_every_file_that_is_named_exists() -> None:
    names = {path.stem for path in HERE.glob("test_*.py")}
    assert {name for files in (*SHARING.values(), LONG) for name in files} | set(MEASURED) <= names


def test_scopes_with_shared_services_go_first_and_folders_last() -> None:
    spark = scope_of("tests/analytics/test_analytics_cli.py::test_a")
    shared = scope_of("tests/e2e/test_clients.py::test_a[b]")
    long = scope_of("tests/e2e/test_docs_commands.py::test_a")
    alone = scope_of("tests/e2e/test_inside.py::test_a")
    rest = scope_of("tests/proxy/forwarder/test_x.py::test_a[b/c]")
    names = [name for _, name in (spark, shared, long, alone, rest)]
    assert names == ["Spark", "open broker", "test_docs_commands", "test_inside", "proxy/forwarder"]
    assert spark < shared < long < alone < rest
    assert shared == scope_of("tests/e2e/test_operations.py::test_b")
