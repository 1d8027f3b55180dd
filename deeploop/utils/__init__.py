"""Helpers without a model in them: errors, files, devices, processes, printing."""
