"""What was measured beside other libraries."""
