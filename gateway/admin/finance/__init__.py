"""The finance API: costs, usage, margin and the end of a month."""
