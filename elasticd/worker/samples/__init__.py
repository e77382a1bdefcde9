"""How samples are chosen, loaded, and noted for an audit."""
