"""What became of every token that a run generated."""
