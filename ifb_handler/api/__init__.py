"""What a client says and hears: request bodies in, answers and errors out. No HTTP, no TorchServe, no model."""
