"""The batch that an iteration trains: the groups in it, and where their rows come from."""
