"""How long an iteration would take under another layout or pipeline, replayed from a run's record. Pure, without clock or
chance.
"""
