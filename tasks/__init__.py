"""One file a step of the iteration: read, call, write, commit, report."""
