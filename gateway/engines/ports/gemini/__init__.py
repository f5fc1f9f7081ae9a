"""Google's Gemini API, on its own address and on Vertex AI."""
