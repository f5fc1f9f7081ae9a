"""API surfaces, one per module: request bodies to `InferenceRequest`s, engine output to responses."""
