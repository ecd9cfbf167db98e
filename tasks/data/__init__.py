"""The rows that a run draws prompts from: of files held in memory, of files too large for that, of a user's function."""
