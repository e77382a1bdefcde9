"""Scripts as users write them, run without changes by torchrun and by elasticd."""
