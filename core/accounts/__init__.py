"""What becomes of prompts, groups and tokens: ledger, lineage, account, history, buffer, curriculum, staleness."""
