"""The dashboard on this gateway's services."""
