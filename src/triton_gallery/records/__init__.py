"""What is kept: pages and their runs, records, figures beside other libraries'; the only room that knows the files."""
