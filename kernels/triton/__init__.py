"""The Triton code of the ops, one file per op under the op's name; importing it needs no Triton.

Inside this package `import triton` still means Triton itself: imports are absolute.
"""
