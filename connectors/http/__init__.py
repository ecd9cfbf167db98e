"""Requests to servers that are not the run's. All connectors may use it."""
