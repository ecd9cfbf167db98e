"""Parts of the dispatcher: the choice of the least loaded engine, the pieces of an answer, and their storage meanwhile."""
