"""A script with options of its own, which the launcher must not read."""

import argparse
import json
import os

parser = argparse.ArgumentParser()
parser.add_argument("--logs")
parser.add_argument("--log", action="store_true")
parser.add_argument("--max-steps", type=int)
parser.add_argument("--max", type=int)
parser.add_argument("--min", type=int)
parser.add_argument("--node")
parser.add_argument("--run")
parser.add_argument("--role")
parser.add_argument("-m")
parser.add_argument("rest", nargs="*")
if os.environ.get("RANK", "0") == "0":
    print(json.dumps(vars(parser.parse_args()), sort_keys=True))
