"""Is accumulation exact for this model and loss? Measured, never inferred from a signature."""
