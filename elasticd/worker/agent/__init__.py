"""What a worker and its agent tell each other."""
