"""A real model generating text over the paged cache: the operators as a server would use them.

- `blocks`: which cache blocks belong to which sequence; shared prefixes
- `model`: a Llama-style forward pass whose attention is the package's operators
- `generate`: chunked prefill, then batched decode of several sequences
- `check`: every greedy token against transformers' own attention
- `cli`: the command
"""
