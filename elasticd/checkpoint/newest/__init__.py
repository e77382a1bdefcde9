"""The record of committed checkpoints: the pointer that names the newest, and which checkpoints are kept."""
