"""How the workers of a new world agree on the commit to go on from, and send each other its state."""
