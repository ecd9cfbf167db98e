"""The final records of iterations: manifests, and summaries of many manifests."""
