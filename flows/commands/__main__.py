"""`python -m millrace.flows.commands` is `millrace`."""

from millrace.flows.commands import app

if __name__ == "__main__":
    app()
