"""A folder on the module path of SGLang's process: what that process loads by itself. Nothing of millrace imports it."""
