"""What runs in a worker: plan, stage and save a state, and load or resume it. The public door is
``elasticd.worker.Checkpoints``."""
