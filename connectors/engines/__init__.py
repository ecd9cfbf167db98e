"""Engines: what sends requests and weights to them, of any kind, and a folder for each kind."""
