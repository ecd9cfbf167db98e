"""Rows of data sources: what a usable one is, and what its columns say of prompts, templates and losses."""
