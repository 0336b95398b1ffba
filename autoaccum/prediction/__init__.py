"""What a size needs, worked out without running it on the device."""
