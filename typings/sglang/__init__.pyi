# What lightrft calls of SGLang, which takes both checkers minutes to follow.
