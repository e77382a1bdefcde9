"""Measurements, side by side in one run: elasticd, torchrun, and the floor. Never timed tests.

python -m tests.bench recovery | node-loss | forming | overhead | hang
"""
