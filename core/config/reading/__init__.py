"""From YAML files and overrides to a RunConfig, and from a RunConfig to the reference page."""
