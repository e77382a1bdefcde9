"""How a training uses its data, as pure functions: the order of the samples, how a batch is dealt to workers,
the order in which gradients are added up, the audit that proves that each sample was used once, and where the
ranks of a run disagree.

The package imports the standard library only, and touches no file. ``elasticd.worker`` loads samples.
"""
