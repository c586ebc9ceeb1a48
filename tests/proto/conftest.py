"""How the tests of the wire run."""

from hypothesis import HealthCheck, settings

# A busy machine is no failure: no deadline for a single example. All else stays as it is, so CI's profile too.
settings.register_profile("patient", settings(), deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")
