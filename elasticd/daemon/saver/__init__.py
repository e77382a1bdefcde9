"""The agent's saver: the agent's side, the saver process, and their records in etcd."""

from typing import Final

OPTIONS: Final = "ELASTICD_SAVER_OPTIONS"  # in the environment of the saver process
ADDRESS: Final = "ELASTICD_SAVER_ADDRESS"  # the saver's own address, in jobs that replicate
