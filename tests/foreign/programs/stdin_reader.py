import sys

print("read:", sys.stdin.read().strip())
