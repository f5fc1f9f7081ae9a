"""What may go in and come out."""
