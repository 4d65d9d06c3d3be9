"""``python -m lightrft``: the same as ``lightrft``, and what torchrun starts."""

from lightrft.cli import main

if __name__ == "__main__":
    main()
