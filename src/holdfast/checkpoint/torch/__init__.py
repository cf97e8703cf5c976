"""PyTorch objects as rows and plain data, and back; which rows training changes."""
