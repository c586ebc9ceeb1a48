"""Daily use of forty principals over sixty days, with cases planted in the last thirty; the same for a seed."""

import random
from datetime import date, timedelta

START = date(2026, 10, 1)
SINCE = date(2026, 10, 31)
DAYS = [START + timedelta(days=place) for place in range(60)]
PRINCIPALS = [f"principal-{number:02}" for number in range(40)]
TWENTY, FIVE, GONE, NEW = PRINCIPALS[3], PRINCIPALS[11], PRINCIPALS[20], PRINCIPALS[30]
PLANTED = {
    (TWENTY, "above", date(2026, 11, 12)),
    (FIVE, "above", date(2026, 11, 18)),
    (GONE, "gone", date(2026, 11, 24)),
    (NEW, "new", date(2026, 11, 9)),
}
FACTORS = {(TWENTY, date(2026, 11, 12)): 20.0, (FIVE, date(2026, 11, 18)): 5.0}


def use_of(seed: int) -> dict[str, dict[date, int]]:
    """Levels from 16 MiB to 256 GiB, lognormal noise of 10 to 35 %, growth, every third hardly used at weekends."""
    chance = random.Random(seed)
    use = {}
    for number, name in enumerate(PRINCIPALS):
        level, noise, growth = 2 ** chance.uniform(24, 38), chance.uniform(0.1, 0.35), chance.uniform(-0.01, 0.01)
        days = {}
        for place, day in enumerate(DAYS):
            value = level * chance.lognormvariate(0, noise) * (1 + growth) ** place
            value *= 0.1 if number % 3 == 0 and day.weekday() >= 5 else 1.0
            days[day] = int(value * FACTORS.get((name, day), 1.0))
        use[name] = days
    use[GONE] = {day: value for day, value in use[GONE].items() if day < date(2026, 11, 24)}
    use[NEW] = {day: value for day, value in use[NEW].items() if day >= date(2026, 11, 9)}
    return use
