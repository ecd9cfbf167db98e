"""Functions that were written for slime's hooks, as they are: named `slime:package.module.function` in a configuration."""
