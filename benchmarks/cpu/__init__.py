"""Parts of the engine's benchmark on a CPU."""
