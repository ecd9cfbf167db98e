"""Configuration models; see core.config.run for the whole."""

from core.config.run import RunConfig as RunConfig
