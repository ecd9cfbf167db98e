"""Off-policy reuse: which trained groups are trained once more, and in what order they are taken. Pure."""
