"""Evaluate a trained model: held-out loss and generated text."""
