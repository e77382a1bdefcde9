"""The worker's end of the link to its agent, and the page of memory that the two share."""
