"""Answers for the benchmark of the data plane: processes that send them, and what makes parts of them."""
