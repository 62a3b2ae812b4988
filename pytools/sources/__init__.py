"""One module per family of kernel records: it turns them into signals."""
