"""Audio and images: requests that an upstream serves and the gateway limits, screens and meters."""
