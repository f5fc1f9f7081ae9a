"""What both backends share: weights in every format, norms, rotations, the KV pool."""
