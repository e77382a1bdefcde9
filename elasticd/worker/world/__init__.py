"""The workers of one round: their process group, its mesh, and waits that end with the world."""
