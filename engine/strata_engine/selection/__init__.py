"""Block top-k: which cells of a long context a query attends to.

`reference` says what is right in plain NumPy, `cpu` and `cuda` say it fast, `launch` runs the CUDA kernels on a
stream, `dispatch` picks among them, `scores` makes the score sets that tests and scripts compare them with.
"""
