"""What makes the models and weights that ship; not in the wheel."""
