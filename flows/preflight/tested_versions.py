"""Tested versions of the packages that millrace needs; `millrace check` compares the installed versions with them.

They come from requirements.lock, with which the suite runs, and from the environments in which a wheel was installed and its
commands check, train, a resume and show passed: tests/installed/passed.json. torch 2.11.0 and SGLang's ran on GPUs.
"""

from __future__ import annotations

TESTED: dict[str, tuple[str, ...]] = {
    "aiohttp": ("3.10.0", "3.14.5"),
    "docstring-parser": ("0.16", "0.18.0"),
    "duckdb": ("2.0.0", "2.0.1"),
    "fastapi": ("0.139.0", "0.150.0"),
    "fsspec": ("2025.3.0", "2026.9.0"),
    "jsonschema": ("4.18.0", "4.26.0"),
    "math-verify": ("0.8.0", "0.9.0"),
    "matplotlib": ("3.9.0", "3.11.2"),
    "megatron-core": ("0.16.1", "0.17.1", "0.18.2", "0.19.2"),
    "mlflow": ("3.17.0", "3.17.2"),
    "numpy": ("1.26.0", "2.4.6", "2.5.5"),
    "orjson": ("3.10.0", "3.13.0"),
    "packaging": ("26.3", "26.4"),
    "prefect": ("3.8.8", "3.9.1"),
    "prefect-ray": ("0.6.0",),
    "psutil": ("6.0.0", "7.2.2"),
    "pyarrow": ("17.0.0", "25.0.1"),
    "pydantic": ("2.10.1", "2.14.3", "2.14.4"),
    "pyyaml": ("6.0.1", "6.0.3", "6.0.4"),
    "ray": ("2.52.0", "2.60.0"),
    "rich": ("13.9.4", "15.0.0"),
    "s3fs": ("2025.3.0", "2026.9.0"),
    "safetensors": ("0.5.0", "0.8.0"),
    "sqlalchemy": ("2.0.20", "2.0.58"),
    "sympy": ("1.14.0",),
    "tenacity": ("9.0.0", "9.2.1"),
    "tokenizers": ("0.22.1", "0.23.3"),
    "torch": ("2.11.0", "2.13.0", "2.15.0"),
    "transformers": ("5.12.0", "5.19.0", "5.24.0"),
    "typer": ("0.15.1", "0.29.2"),
    "typing-extensions": ("4.16.0",),
    "uvicorn": ("0.30.0", "0.54.0"),
}
TESTED_SGLANG = ("0.5.17", "0.5.23")  # on a GPU, and on a CPU by the contract suite of both engines
EXACT = ("megatron-core", "sglang")  # for these, another patch version counts as not tested
SHOWN = ("torch", "megatron-core", "transformers", "ray", "prefect")  # the plan always has them
