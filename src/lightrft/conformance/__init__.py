"""The proof that a backend means what the Protocols say. Here so far: the rank pool, on which tests of several ranks run."""
