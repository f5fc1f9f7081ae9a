"""`tollhouse doctor`: finds what is wrong with an installation."""
