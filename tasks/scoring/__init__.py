"""How a sample gets its reward: scoring processes, batches of rewards that wait, a teacher's scores."""
