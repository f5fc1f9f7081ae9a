"""The command of prices."""
