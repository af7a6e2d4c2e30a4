"""Settings of every test."""

from hypothesis import settings

# Tests do not time: a slow machine is not a failure.
settings.register_profile("specdec", deadline=None)
settings.load_profile("specdec")
