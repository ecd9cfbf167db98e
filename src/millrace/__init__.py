"""millrace: LLM reinforcement-learning post-training as resumable Prefect flows."""
