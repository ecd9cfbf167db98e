"""The batch that an iteration trains: its groups, and the sources of their rows."""
