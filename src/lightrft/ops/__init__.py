"""The functions that backends are composed of, one subject a file. They know no backend and no engine."""
