"""What is kept of a run: pages and their runs, records, and rows that scripts measured."""
