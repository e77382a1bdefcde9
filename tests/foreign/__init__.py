"""Scripts as others write them, run unmodified by torchrun and by elasticd."""
