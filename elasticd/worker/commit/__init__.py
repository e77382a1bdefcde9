"""What a commit of a State keeps, restores and compares."""
