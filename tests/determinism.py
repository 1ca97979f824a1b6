"""How hypothesis draws in all tests: the same examples in each run, however long they take."""

from hypothesis import settings

settings.register_profile("zbpipe", deadline=None, derandomize=True)
settings.load_profile("zbpipe")
