"""What ``holdfast ckpt`` does: look at stores, verify, tidy, export."""
