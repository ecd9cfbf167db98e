"""How one sample is made: requests to engines, unfinished answers, rollouts of several turns, held-out sets."""
