"""Configuration models; see millrace.core.config.run for the whole."""

from millrace.core.config.run import RunConfig as RunConfig
