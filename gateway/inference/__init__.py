"""The inference APIs: their requests, their responses, and what they share."""
