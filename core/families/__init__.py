"""A Hugging Face checkpoint folder: its config.json and its weight files, each read whole or refused."""
