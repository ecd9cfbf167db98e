"""Teachers that a server has."""
