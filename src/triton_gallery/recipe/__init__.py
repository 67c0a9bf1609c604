"""What a recipe is: which exist, their cells and hashes, what they need and put out, and what executes them."""
