"""Scripts as users write them, run unmodified by torchrun and by elasticd."""
