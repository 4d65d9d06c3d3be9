"""The proof that a backend means what the Protocols say: the laws, and how anybody checks their own backend by them.

``run.check_backend`` is the way in from Python, ``lightrft conformance`` from the command line.
"""
