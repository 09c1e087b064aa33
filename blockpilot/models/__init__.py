"""What runs on the device: the target, its cache, packed rows, linear kernels."""
