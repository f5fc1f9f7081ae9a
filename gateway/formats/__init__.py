"""One folder a public API: reads its body, writes its answers and events."""
