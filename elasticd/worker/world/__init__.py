"""The workers of one round: their process group, and what they send each other."""
