"""What the dispatcher works with: the least loaded engine, the pieces of an answer, and their storage meanwhile."""
