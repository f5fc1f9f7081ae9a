"""Invoices and credit notes, from lines to postings and print."""
