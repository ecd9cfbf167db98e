"""Kill a training run anywhere and hold it to its promises: `python -m tests.soak --help`."""
