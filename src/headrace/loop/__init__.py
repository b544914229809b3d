"""Anyone's training loop: a user's model, optimizer and data set, driven by plans."""
