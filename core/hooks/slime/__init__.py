"""Functions written for slime's hooks, unchanged: named `slime:package.module.function` in a configuration."""
