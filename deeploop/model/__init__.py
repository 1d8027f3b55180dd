"""The model: sublayers, the walk over their visits, residual rules, experts, caches and loss."""
