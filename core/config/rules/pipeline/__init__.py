"""Rules of `pipeline`, a file for each way in which generation and training overlap."""
