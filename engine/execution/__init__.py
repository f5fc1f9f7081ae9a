"""What runs a step on the CPU or the GPU."""
