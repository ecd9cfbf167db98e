"""`python -m millrace.flows.cli` is `millrace`."""

from millrace.flows.cli import app

if __name__ == "__main__":
    app()
