"""What the commands share: settings and database, output, options."""
