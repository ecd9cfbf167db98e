"""The rows that a run draws prompts from: of files that are held, of files too large for that, of a user's function."""
