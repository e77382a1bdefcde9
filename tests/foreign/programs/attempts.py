"""Fails in the first round, as its launcher counts rounds."""

import os
import sys

attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
print(f"rank {os.environ['RANK']} attempt {attempt} of run {os.environ['TORCHELASTIC_RUN_ID'] != ''}")
sys.exit(3 if attempt == 0 and os.environ["RANK"] == "0" else 0)
