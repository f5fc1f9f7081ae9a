"""Wire shapes, Pydantic, HTTP only."""
