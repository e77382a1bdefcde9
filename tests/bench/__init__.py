"""Measurements, side by side in one run: elasticd, torchrun, and the floor. Never timed tests.

python -m tests.bench recovery | resize | goodput | node-loss | forming | overhead | hang
"""
