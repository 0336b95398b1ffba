"""A Hugging Face Trainer, tuned: one file per question. Imported only where transformers is known to be there."""
