"""Moving KV from a prefill engine to a decode engine."""
