"""Members, roles and single sign-on."""
