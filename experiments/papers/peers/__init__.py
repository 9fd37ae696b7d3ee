"""Claims of the papers behind methods that other libraries offer: number formats, and sparse sums of constant bytes."""
