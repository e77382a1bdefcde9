"""The workers of one round: their process group, and the exchange of the state."""
