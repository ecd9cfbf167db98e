"""Content of a run's pages: texts, tables and pictures, made from metrics. Sends nothing."""
