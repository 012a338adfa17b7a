"""An HTTP proxy in front of engines that records what they answer."""
