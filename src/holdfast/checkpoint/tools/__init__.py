"""The functions behind ``holdfast ckpt``: inspect, verify, clean up, export."""
