"""The mathematics of the model, one block per file.

Shape suffixes used throughout the package: T tokens in the pack, B batch, S sequence, D model width, H heads,
P head width, N state, G groups, E experts, K chosen experts, J MTP depths, L latent width, F expert hidden,
V vocabulary, C convolution channels. `x_TD` is [tokens, width]; A, B, C, D, dt are the letters of the Mamba-2
paper.
"""
