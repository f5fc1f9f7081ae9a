"""Tables of the safety desk."""
