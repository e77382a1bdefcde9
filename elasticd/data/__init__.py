"""How a training uses its data, as pure functions.

The package has the order of the samples, the dealing of a batch to workers, and the order in which gradients
are added up. It also has the audit, which proves that each sample was used once, and finds where ranks
disagree. The package imports the standard library only, and touches no file. ``elasticd.worker`` loads
samples.
"""
