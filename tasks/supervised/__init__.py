"""Tasks of supervised training: its batches, and its held-out loss."""
