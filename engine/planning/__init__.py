"""What a model needs of a device, what it costs in time, and the real scheduler in simulated time."""
