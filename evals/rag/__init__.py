"""A LlamaIndex query engine over one persistent memory: what it prefills, and what retracting a passage does."""
