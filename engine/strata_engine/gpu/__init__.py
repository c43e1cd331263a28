"""What every GPU kernel stands on: the device, compiled kernels, macros."""
