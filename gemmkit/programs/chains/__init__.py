"""Programs whose rounds compute with what they multiply: attention, the layers of an MLP, chains of products."""
