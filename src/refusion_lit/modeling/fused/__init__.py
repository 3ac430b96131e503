"""The fused backbone: runs known architectures with fewer operations per layer than the library's forward."""
