"""What a run shows of an iteration: its page, tables and pictures."""
