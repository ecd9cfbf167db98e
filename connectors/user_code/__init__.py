"""Processes that run the code of users and models: pools, sessions, sandboxes."""
