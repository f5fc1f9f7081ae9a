"""The models and adapters that the gateway serves, and their capabilities."""
