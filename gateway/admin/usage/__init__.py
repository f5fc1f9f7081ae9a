"""Usage that was reported, parked or recovered."""
