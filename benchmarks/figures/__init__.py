"""The rows of docs/performance.md."""
