"""Statements of the seller's bank: their formats, and the matching of wires to invoices."""
