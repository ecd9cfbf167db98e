"""The house lint: rules about the shape of the code that ruff, mypy and import-linter do not know.

`python -m tests.house` prints every violation with its remedy; `make lint` and pre-commit run it.
"""
