"""Wrong kernels, each a small edit of a right one, that the tests must reject.

A file here names the source it breaks (FILE, under kernels/), the text it replaces
(OLD, which must occur exactly COUNT times, 1 by default) and what stands there instead
(NEW), and the tests that must fail on it (TESTS, pytest arguments under
tests/kernels/; those in interpreter/ run the Triton code).
"""
