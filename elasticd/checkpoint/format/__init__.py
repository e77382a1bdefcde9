"""The files of a checkpoint: the manifest with its checksums, DCP's metadata, and the frames of tensors."""
