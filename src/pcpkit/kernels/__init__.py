"""The model's device work: one hot path per file, each op beside its torch reference."""
