"""Worker processes that can be killed one by one."""
