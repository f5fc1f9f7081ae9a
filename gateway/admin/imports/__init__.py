"""`tollhouse import`: configurations of other gateways, as ours."""
