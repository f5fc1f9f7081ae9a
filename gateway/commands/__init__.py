"""The subcommands of `tollhouse`, one file per noun."""
