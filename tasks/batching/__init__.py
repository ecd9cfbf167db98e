"""How groups become the batch that an iteration trains."""
