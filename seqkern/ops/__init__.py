"""The functional API, one file an op: checks, autograd, fake kernels, batching rules and cost."""
