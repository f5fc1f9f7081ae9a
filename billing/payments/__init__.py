"""Payment providers behind one port."""
