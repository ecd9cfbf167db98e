"""What an iteration leaves for good: its manifest, and summaries of many manifests."""
