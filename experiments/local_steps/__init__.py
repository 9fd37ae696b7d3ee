"""Accuracy of training with local steps, against exchanging the gradients of every step."""
