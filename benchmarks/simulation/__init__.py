"""All of billing in one process, on a fake clock, with faults that a seed decides."""
