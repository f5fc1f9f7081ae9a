"""Float products and attention whose results for a row do not depend on the rows beside it."""
