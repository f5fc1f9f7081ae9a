"""Projects, users, invites and keys in the format of OpenAI's administration API."""
