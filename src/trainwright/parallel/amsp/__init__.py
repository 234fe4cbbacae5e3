"""AMSP: parameters, gradients and optimizer states sharded over different numbers of ranks."""
