"""`check --connect`: how many brokers are tried, and what is said of more."""

import pytest
import trio.testing

from lookup.brokers.discovery import Endpoint
from proxy.commands import connect
from proxy.commands.connect import BROKERS_MAX, ClientMethods, Finding, check_brokers
from proxy.config.types import Brokers, Config


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch) -> list[Endpoint]:
    """Brokers that were tried; all of them are well."""
    found: list[Endpoint] = []

    async def findings(_trial: object, broker: Endpoint) -> list[Finding]:
        found.append(broker)
        return [Finding(good=True, text="answers")]

    monkeypatch.setattr(connect._BrokerCheck, "findings", findings)
    return found


def before(count: int) -> Config:
    """So many brokers, by their addresses."""
    return Config(brokers=Brokers(service_url=f"pulsar://{','.join(f'127.0.0.1:{7000 + n}' for n in range(count))}"))


async def test_all_brokers_are_tried(tried: list[Endpoint], autojump_clock: trio.testing.MockClock) -> None:
    findings = await check_brokers(before(BROKERS_MAX), None, ClientMethods())
    assert len(tried) == len(findings) == BROKERS_MAX
    assert all(finding.good for finding in findings)


@pytest.mark.parametrize(("more", "says"), [(1, "1 more broker was"), (2, "2 more brokers were")])
async def test_brokers_that_were_not_tried_are_not_well(
    tried: list[Endpoint], autojump_clock: trio.testing.MockClock, more: int, says: str
) -> None:
    """Any of them may be the one that cannot be used."""
    *good, last = await check_brokers(before(BROKERS_MAX + more), None, ClientMethods())
    assert len(tried) == len(good) == BROKERS_MAX
    assert last == Finding(
        good=False, text=f"{says} not tried: 64 at most are. Check the rest with a brokers.service_url of its own"
    )
