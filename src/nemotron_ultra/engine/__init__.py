"""What executes a step: the torch reference, and checkpoints."""
