"""Prints a project's dependencies, so that they can be installed before its sources are there."""

import sys
import tomllib

with open(sys.argv[1], "rb") as file:
    print("\n".join(tomllib.load(file)["project"]["dependencies"]))
