"""What a Hugging Face folder says of a model: sizes, tensors, templates. Each file is read whole or refused."""
