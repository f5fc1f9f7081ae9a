"""What adapters change in a step: sums of low rank, DoRA, tables and heads of their own."""
