"""Training of the learned parts: samples, the objective, and the trainer."""
