"""How long an iteration would take under another layout or pipeline, replayed from what a run recorded. Pure, no clock, no chance."""
