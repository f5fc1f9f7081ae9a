"""What leaves the engine: results, beams and the best of several answers."""
