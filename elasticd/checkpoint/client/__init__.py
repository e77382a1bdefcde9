"""The code that runs in a worker: plan, stage and save a state, and load or resume it. Scripts use
``elasticd.worker.Checkpoints``."""
