"""How the workers' gradients become one: the mean of DistributedDataParallel, or, in consistent mode, a sum
in a fixed order."""
