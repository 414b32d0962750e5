"""Settings of all tests: no example of a property has a deadline, since machines differ."""

from hypothesis import settings

settings.register_profile("forerun", deadline=None)
settings.load_profile("forerun")
