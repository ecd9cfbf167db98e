"""The rows of benchmarks/README.md."""
