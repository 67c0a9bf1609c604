"""What the launches of recipes compile to for GPUs that need not be here."""
