"""The agent's saver: the agent's side of it, the process, and what they keep in etcd."""

from typing import Final

OPTIONS: Final = "ELASTICD_SAVER_OPTIONS"  # in the environment of the process
HOLDER: Final = "ELASTICD_SAVER_HOLDER"
