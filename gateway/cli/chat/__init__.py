"""`tollhouse chat`: a conversation with a served model in the terminal."""
