"""The global memory divided by the writes of this loop, not by all it ever had."""

FILE = "looping_update.py"
OLD = "1 / _weight((loop - 1) * n_layers + layer, decay)"
NEW = "1 / _weight(layer, decay)"
TESTS = ["test_looping.py"]
