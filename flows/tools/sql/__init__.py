"""`millrace sql`: a run's tables as views that DuckDB is asked about."""

from millrace.flows.tools.sql.query import ALL, QueryError, answer, connect

__all__ = ["ALL", "QueryError", "answer", "connect"]
