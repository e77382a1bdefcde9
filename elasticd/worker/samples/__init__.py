"""Choose the samples of a training, load them, and note them for an audit."""
