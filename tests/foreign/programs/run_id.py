"""Prints the id of its run, and fails in the first round."""

import os
import sys

print(os.environ["TORCHELASTIC_RUN_ID"])
sys.exit(3 if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" else 0)
