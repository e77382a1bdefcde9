"""The commits of a State: the copies to go back to, and the comparison of the workers' values."""
