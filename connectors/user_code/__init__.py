"""Worker processes that can be killed one at a time."""
