"""Checkpoints: where they lie and how they get there (``layout``), and what is in them (``state``)."""
