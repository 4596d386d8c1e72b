"""What SGLang looks for where its own kernels are not built: it has another way, and takes it if this is nothing."""
