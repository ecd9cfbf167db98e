"""Rows of data sources: which are usable, and what their columns say about prompts, templates and losses."""
