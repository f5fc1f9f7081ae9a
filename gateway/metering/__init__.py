"""What is billed and what is waived, and its way to the books."""
