"""One file a backend; each has ``build(config, args=None) -> Strategy``."""
