"""Engines: each speaks SGLang's protocol."""
