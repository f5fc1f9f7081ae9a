"""One file a surface: how a body becomes an Ask and how output becomes an answer."""
