"""Measurements of elasticd, of torchrun, and of the floor (the least work that could do the same), side by
side in one run. No test asserts their times. python -m tests.bench recovery | resize | goodput | node-loss |
forming | overhead | hang"""
