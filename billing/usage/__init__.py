"""Usage events: stored once, summed by hour and day, and read through one port."""
