"""Settings of all tests: a slow machine is no fault of a property."""

from hypothesis import HealthCheck, settings

settings.register_profile("rekindle", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("rekindle")
