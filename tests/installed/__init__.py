"""The wheel in an environment of its own, without the lock: `python -m tests.installed --help`."""
