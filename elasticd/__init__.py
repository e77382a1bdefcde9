"""elasticd keeps PyTorch training running on machines that fail, get preempted, and come back."""

__version__ = "0.1.0"
