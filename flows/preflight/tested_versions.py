"""Versions of the packages that millrace needs with which it was tested: `millrace check` compares the installed ones with them.

With each, a wheel in a fresh environment trained, resumed and was looked at: `python -m tests.installed --help`. requirements.lock
names one of each.
"""

from __future__ import annotations

TESTED: dict[str, tuple[str, ...]] = {
    "aiohttp": ("3.14.5",),
    "docstring-parser": ("0.18.0",),
    "duckdb": ("2.0.0", "2.0.1"),
    "fastapi": ("0.150.0",),
    "fsspec": ("2026.9.0",),
    "jsonschema": ("4.26.0",),
    "math-verify": ("0.9.0",),
    "matplotlib": ("3.11.2",),
    "megatron-core": ("0.16.1", "0.17.1", "0.18.2", "0.19.2"),
    "mlflow": ("3.17.2",),
    "numpy": ("2.4.6", "2.5.5"),
    "orjson": ("3.13.0",),
    "packaging": ("26.3", "26.4"),
    "prefect": ("3.8.8", "3.9.1"),
    "prefect-ray": ("0.6.0",),
    "psutil": ("7.2.2",),
    "pyarrow": ("25.0.1",),
    "pydantic": ("2.14.3", "2.14.4"),
    "pyyaml": ("6.0.3", "6.0.4"),
    "ray": ("2.60.0",),
    "rich": ("15.0.0",),
    "s3fs": ("2026.9.0",),
    "safetensors": ("0.8.0",),
    "sqlalchemy": ("2.0.58",),
    "sympy": ("1.14.0",),
    "tenacity": ("9.2.1",),
    "tokenizers": ("0.23.3",),
    "torch": ("2.11.0", "2.13.0", "2.14.1"),
    "transformers": ("5.19.0", "5.24.0"),
    "typer": ("0.29.2",),
    "typing-extensions": ("4.16.0",),
    "uvicorn": ("0.54.0",),
}
TESTED_SGLANG = ("0.5.17", "0.5.23")  # on a GPU, and on a CPU by the suite that both engines pass
EXACT = (
    "megatron-core",
    "sglang",
)  # compared to the last number; of the others two versions of one minor count as one
SHOWN = ("torch", "megatron-core", "transformers", "ray", "prefect")  # the plan always has them
